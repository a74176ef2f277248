"""`peerloom demo`: five real nodes, a training, a death, a result; one file per part of it."""
