"""Tests on hosts that are emulated on this machine. They need root."""
