"""Calibration of a device: the time that classes of operators take on it, measured in a separate process."""
