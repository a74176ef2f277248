"""The simulator: real protocol code in virtual time, as bare cores (`engine`) or whole nodes (`seams`)."""
