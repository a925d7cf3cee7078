"""Deliberate faults in the plugin, and what of the tests has to catch each of them."""
