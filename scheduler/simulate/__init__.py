"""A discrete-event simulation of a server: the production decisions over simulated devices."""
