"""Tests of simulated worlds, of cores alone and of whole nodes."""
