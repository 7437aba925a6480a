"""The world of a scheduler: requests, steps on a made-up model, and the rules of both.

`SchedulerSubject` makes its worlds; `state` is below the operations, `world` above them.
"""
