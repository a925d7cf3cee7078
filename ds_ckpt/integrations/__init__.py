"""Plugins of training frameworks, each imported by its framework alone."""
