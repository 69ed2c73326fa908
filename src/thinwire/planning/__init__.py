"""Predict the time of a training step: an event simulation of hosts, links, ranks and their threads."""
