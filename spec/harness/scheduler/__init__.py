"""The world of a scheduler: requests, steps of a simulated model, and the checks of both.

`SchedulerSubject` makes its worlds; `state` is below the operations, `world` above them.
"""
