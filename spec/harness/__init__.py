"""Runs the specification against a system under test: worlds, engines, shrinking and traces.

An engine (random or Hypothesis) draws operations from a world, which applies them and checks every
rule. Public: `make_subject`, `run`, `replay`, `shrink`, `CacheMachine` and the pytest plugin.
"""
