"""The report of an experiment: files, pictures and lines on a screen, all computed from its `Result`."""
