"""`NodeSupervisor`: ended nodes are started again, after a bounded pause."""

from __future__ import annotations

from radixkv.scheduler.nodes.supervisor import CHECK_S, NodeSupervisor


class Fleet:
    """Nodes that end when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_full = False
        self.num_checks = 0
        self.down: dict[str, str] = {}
        self.said: list[str] = []
        self.supervisor = NodeSupervisor(self, self.said.append, clock=lambda: self.now)

    def ended(self) -> dict[str, str]:
        self.num_checks += 1
        return dict(self.down)

    def restart(self, name: str) -> None:
        if self.is_full:
            raise BlockingIOError("no more processes")
        del self.down[name]

    def pass_time(self, seconds: float) -> list[str]:
        """Let time pass; return what was said."""
        self.said.clear()
        for _ in range(round(seconds / CHECK_S)):
            self.now += CHECK_S
            self.supervisor.tick()
        return list(self.said)

    def end(self) -> str:
        """End a node; return what is said at once."""
        self.down["decode-0"] = "decode-0 was ended (Killed)"
        [line] = self.pass_time(CHECK_S)
        return line


def test_a_node_that_has_ended_is_started_again() -> None:
    fleet = Fleet()
    assert fleet.pass_time(10) == []
    assert fleet.end() == "decode-0 was ended (Killed); it is started again in 1 s"
    assert fleet.pass_time(1 - CHECK_S) == [] and fleet.down
    assert fleet.pass_time(CHECK_S) == ["decode-0 is started again"] and not fleet.down


def test_the_pause_doubles_up_to_a_minute_and_begins_anew_for_a_node_that_stays() -> None:
    fleet, pauses = Fleet(), []
    for _ in range(9):
        pauses.append(float(fleet.end().split()[-2]))
        assert fleet.pass_time(pauses[-1]) == ["decode-0 is started again"]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    fleet.pass_time(60 - 2 * CHECK_S)
    assert "in 60 s" in fleet.end()
    fleet.pass_time(60)
    fleet.pass_time(60)
    assert "in 1 s" in fleet.end()


def test_a_node_that_stays_for_less_than_a_minute_waits_longer_each_time() -> None:
    fleet, pauses = Fleet(), []
    for _ in range(4):
        pauses.append(float(fleet.end().split()[-2]))
        fleet.pass_time(pauses[-1])
        fleet.pass_time(30)
    assert pauses == [1, 2, 4, 8]


def test_other_nodes_do_not_wait() -> None:
    fleet = Fleet()
    for _ in range(5):
        fleet.end()
        fleet.pass_time(32)
    fleet.end()
    fleet.down["prefill-0"] = "prefill-0 has ended with status 1: no room"
    assert fleet.pass_time(CHECK_S) == [
        "prefill-0 has ended with status 1: no room; it is started again in 1 s"
    ]


def test_a_node_that_cannot_be_started_is_tried_again() -> None:
    fleet = Fleet()
    fleet.is_full = True
    fleet.end()
    assert fleet.pass_time(1 + CHECK_S) == [
        "decode-0 cannot be started: no more processes",
        "decode-0 was ended (Killed); it is started again in 2 s",
    ]
    fleet.is_full = False
    assert fleet.pass_time(2) == ["decode-0 is started again"]


def test_processes_are_not_looked_at_in_every_step() -> None:
    fleet = Fleet()
    for _ in range(100):
        fleet.supervisor.tick()
    assert fleet.num_checks == 1
