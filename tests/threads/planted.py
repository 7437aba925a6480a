"""Bugs to plant: each lock left out, each notification left out, and wrong orders by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """A bug in the source of a module.

    Attributes:
        name: what is wrong, and where.
        find, replace: the text to replace; it occurs once. Or, with number:
        number: which lock or notification of the module to leave out.
    """

    name: str
    number: int = -1
    find: str = ""
    replace: str = ""

    def __call__(self, source: str) -> str | ast.Module:
        """Return the module with the bug, each line at its place."""
        if self.find:
            assert source.count(self.find) == 1, f"{self.name}: its text occurs not once"
            return source.replace(self.find, self.replace)
        tree = ast.parse(source)
        [(_, node)] = [each for n, each in enumerate(_guards(tree)) if n == self.number]
        _Remover(node).visit(tree)
        return ast.fix_missing_locations(tree)


def left_out(source: str) -> list[Planted]:
    """Return a bug for each lock that is taken, and for each notification."""
    return [Planted(name, number) for number, (name, _) in enumerate(_guards(ast.parse(source)))]


def _guards(tree: ast.AST, path: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in ast.iter_child_nodes(tree):
        inner = path
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            inner = f"{path}.{node.name}".lstrip(".")
        elif isinstance(node, ast.With) and _is_lock(node.items[0].context_expr):
            if not all(map(_is_kept, node.body)):
                yield f"{path}: {ast.unparse(node.items[0])}", node
        elif isinstance(node, ast.Expr) and ".notify" in ast.unparse(node):
            yield f"{path}: {ast.unparse(node)}", node
        yield from _guards(node, inner)


def _is_lock(node: ast.expr) -> bool:
    name = ast.unparse(node).split("(")[0].rsplit(".", 1)[-1]
    return name.endswith(("_lock", "_changed", "_stripe"))


def _is_kept(node: ast.stmt) -> bool:
    """Whether a statement waits or notifies, which raises without the lock."""
    waits = (".wait(", ".wait_for(", ".notify")
    return isinstance(node, ast.Expr) and any(text in ast.unparse(node) for text in waits)


class _Remover(ast.NodeTransformer):
    """Leaves out a notification, or a lock around all but single waits and notifications."""

    def __init__(self, node: ast.stmt) -> None:
        self._node = node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if node is not self._node:
            return super().generic_visit(node)
        if not isinstance(node, ast.With):
            return ast.copy_location(ast.Pass(), node)
        keeper = _Keeper(node.items)
        body = [keeper.visit(each) for each in node.body]
        return ast.copy_location(ast.If(ast.Constant(True), body, []), node)


class _Keeper(ast.NodeTransformer):
    """Takes a lock for single statements: those that wait or notify."""

    def __init__(self, items: list[ast.withitem]) -> None:
        self._items = items

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_kept(node):
            return node
        return ast.copy_location(ast.With(items=self._items, body=[node]), node)


BY_HAND: dict[str, tuple[Planted, ...]] = {
    "scheduler.serving.engine_thread": (
        Planted(
            "EngineThread._post: is_posted is set after the loop is called",
            find="""                consumer.is_posted = True
                by_loop.setdefault(loop, []).append(consumer)
        for loop, consumers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, consumers)
""",
            replace="""                by_loop.setdefault(loop, []).append(consumer)
        for loop, consumers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, consumers)
                for consumer in consumers:
                    consumer.is_posted = True
""",
        ),
        Planted(
            "EngineThread._end: finish_reason is set before num_tokens",
            find="""        delivery.num_tokens = len(request.output_tokens)
        delivery.finish_reason = request.finish_reason
""",
            replace="""        delivery.finish_reason = request.finish_reason
        delivery.num_tokens = len(request.output_tokens)
""",
        ),
        Planted(
            "EngineThread.submit: a request is known only after its command",
            find="""            self._deliveries.update(consumer.deliveries)
            self._commands.put(partial(self._add, consumer))
""",
            replace="""            self._commands.put(partial(self._add, consumer))
        self._deliveries.update(consumer.deliveries)
""",
        ),
        Planted(
            "EngineThread._obey: an engine without work spins",
            find="self._commands.get(block, self._poll_s)",
            replace="self._commands.get(block and self._poll_s is None)",
        ),
        Planted(
            "EngineThread.close: requests are refused only after the command to close",
            find="""        with self._lock:
            if self._refusal is None:
                self._refusal = EngineClosedError("the engine is closed")
        self.close_soon(drain=drain, timeout_s=timeout_s)
""",
            replace="""        self.close_soon(drain=drain, timeout_s=timeout_s)
        with self._lock:
            if self._refusal is None:
                self._refusal = EngineClosedError("the engine is closed")
""",
        ),
    ),
    "scheduler.serving.async_engine": (
        Planted(
            "OutputStream._take: num_tokens is read before finish_reason",
            find="completion.take(delivery.num_tokens, reason)",
            replace="completion.take(delivery.num_tokens, delivery.finish_reason)",
        ),
        Planted(
            "OutputStream.__anext__: the loop is set after the first look",
            find="""            while self._live:
                if (output := self._take()) is not None:
                    return output
""",
            replace="""            while self._live:
                consumer.loop = None
                output = self._take()
                consumer.loop = loop
                if output is not None:
                    return output
""",
        ),
    ),
    "scheduler.events.publisher": (
        Planted(
            "EventPublisher._send: a batch is kept after it is sent",
            find="""        with self._lock:
            self._kept.add(batch.seq, payload)
        socket.send_multipart((self._topic, _seq_bytes(batch.seq), payload))
""",
            replace="""        frames = (self._topic, _seq_bytes(batch.seq), payload)
        socket.send_multipart(frames)
        with self._lock:
            self._kept.add(batch.seq, payload)
""",
        ),
    ),
    "scheduler.metrics.recorder": (
        Planted(
            "Recorder._give: the end is marked after the lock was given back",
            find="""            asked, self._asked = self._asked, None
            self.has_ended = is_final
""",
            replace="""            asked, self._asked = self._asked, None
        self.has_ended = is_final
""",
        ),
    ),
    "scheduler.metrics.engine_metrics": (
        Planted(
            "EngineMetrics._ask: the engine is called before there is a future",
            find="""        asked = self._recorder.ask()
        with suppress(EngineClosedError, EngineFailedError):  # the next step answers, or the end
            self._engine.submit_call(self._recorder.answer)
        return asked
""",
            replace="""        with suppress(EngineClosedError, EngineFailedError):
            self._engine.submit_call(self._recorder.answer)
        return self._recorder.ask()
""",
        ),
    ),
    "scheduler.nodes.transport.threaded": (
        Planted(
            "ThreadedTransport._loop: waits without a look at the commands",
            find="and not self._commands and not self._is_closed:",
            replace="and not self._is_closed:",
        ),
    ),
    "kvcache.storage.files.backend": (
        Planted(
            "FileBackend._forget: a value that was written again is forgotten",
            find="""            try:
                self._files.read(self._path(key), [])
            except FileNotFoundError:
                self._index.forget(key)
""",
            replace="            self._index.forget(key)\n",
        ),
    ),
    "kvcache.storage.mooncake.backend": (
        Planted(
            "MooncakeBackend._take_back: it is looked up before the lock whether it is closed",
            find="""        with self._lock:
            keep = client.alive and not self._closed
""",
            replace="""        keep = client.alive and not self._closed
        with self._lock:
""",
        ),
    ),
    "kvcache.storage.workers": (
        Planted(
            "StorageWorkers._work: one of those that wait for a report is woken",
            find="                self._reported.notify_all()\n                if (\n",
            replace="                self._reported.notify()\n                if (\n",
        ),
        Planted(
            "StorageWorkers.poll: completions are taken after the lock was given back",
            find="            return self._table.drain()\n",
            replace="        return self._table.drain()\n",
        ),
        Planted(
            "StorageWorkers._work: the other thread continues, also after close",
            find="""                    and self._table.running[task.kind]
                    and not self._closed
""",
            replace="""                    and self._table.running[task.kind]
""",
        ),
    ),
}
"""Bugs besides those that `left_out` finds, by module."""

NOT_NEEDED: dict[str, dict[str, str]] = {
    "kvcache.copies.background_writer": {
        "BackgroundWriter.close: self._changed": "only the notification needs it",
    },
    "kvcache.storage.workers": {
        "StorageWorkers.fenced: self._lock": "an operation that has ended only loses tasks",
    },
    "scheduler.serving.engine_thread": {
        "EngineThread._call: self._lock": "only this thread replaces the set; discard is atomic",
        "EngineThread._post: self._lock": "only this thread replaces the set, in one call",
    },
    "scheduler.nodes.transport.threaded": {
        "ThreadedTransport.close: self._changed": "only the notification needs it",
    },
    "kvcache.storage.files.lru_index": {
        "LruIndex.fill: self._lock": "called before any other thread has the index",
        "LruIndex.check: self._lock": "called while no thread writes",
    },
}
"""What may be left out, by module, and why nothing goes wrong then."""
