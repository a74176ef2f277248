"""A run at one of its members, from the first plan to the end. The pure parts are driven by nodes and by the
simulator alike."""
