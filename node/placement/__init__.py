"""Who gets what: which peers to ask for a stage, and what this node takes on."""
