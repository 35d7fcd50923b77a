"""Helpers of the tests: real ranks, warm processes, small models, references and coverage."""
