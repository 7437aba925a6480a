"""Continuous batching: fill a step within the token budget, preempt, park and resume.

The mixed, prefill and decode schedulers each hold one `batch.BatchScheduler`.
"""
