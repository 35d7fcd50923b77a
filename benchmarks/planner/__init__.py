"""Predicted beside measured step times of layouts on this machine."""
