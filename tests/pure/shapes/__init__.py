"""Tests of models in numbers."""
