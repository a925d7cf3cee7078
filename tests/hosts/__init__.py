"""Tests on hosts that are emulated on this machine. Those of a launcher need root."""
