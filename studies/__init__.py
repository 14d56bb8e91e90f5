"""Measurements that are commands, not tests: a folder a study, with its runner, its tables and its tests."""
