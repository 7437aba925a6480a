"""The queues of a scheduler: running, preempted and waiting requests."""

from __future__ import annotations

from bisect import insort

from ..policy import Policy
from ..request import Request, RequestStatus


class RequestQueues:
    """Requests that have not ended, each in one of three queues.

    Attributes:
        policy: order of the preempted and of the waiting requests.
        running: requests that hold blocks, in order of admission; some may still be loading.
        preempted: requests that lost their blocks, in the policy's order.
        waiting: requests that never held blocks, in the policy's order.
        num_departures: number of times that a request left the running ones.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.waiting: list[Request] = []
        self.num_departures = 0
        self._requests: dict[str, Request] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._requests)

    def find(self, request_id: str) -> Request | None:
        """Return the request with an id, if it has not ended."""
        return self._requests.get(request_id)

    def number(self, request: Request) -> None:
        """Give a request the next arrival number."""
        request.arrival = self._arrivals
        self._arrivals += 1

    def add(self, request: Request) -> None:
        """Add a new request to the waiting ones."""
        insort(self.waiting, request, key=self.policy.order)  # the policy may raise
        self._requests[request.request_id] = request

    def add_running(self, request: Request) -> None:
        """Add a request that already holds blocks."""
        assert request.request_id not in self._requests, f"{request!r} starts twice"
        self._requests[request.request_id] = request
        self.running.append(request)

    def suspend(self, request: Request) -> None:
        """Move a running request to the preempted ones."""
        self.running.remove(request)
        self.num_departures += 1
        request.status = RequestStatus.PREEMPTED
        insort(self.preempted, request, key=self.policy.order)

    def remove(self, request: Request) -> None:
        """Remove a request that ends."""
        queue = {
            RequestStatus.LOADING: self.running,
            RequestStatus.RUNNING: self.running,
            RequestStatus.PREEMPTED: self.preempted,
            RequestStatus.WAITING: self.waiting,
        }[request.status]
        queue.remove(request)
        self.num_departures += queue is self.running
        del self._requests[request.request_id]
