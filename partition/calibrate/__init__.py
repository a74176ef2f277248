"""What classes of operators take on a device, measured in a process of its own."""
