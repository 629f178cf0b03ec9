"""An HTTP server that is called: each call takes a while, and there may be too many.

    python -m bench.call_server service_ms slots queue [rates]

A call takes ``service_ms`` in one of the slots; with 0 of them no call waits for another. Calls
that find none free wait in line, and if ``queue`` of them wait already, are refused: 429, with a
Retry-After of a second. ``rates`` is a JSON object of calls a second by the first word of a run's
name: calls above that are refused too, though a tenth of a second's may come at once. How long a
call takes is computed, and waited for: a busy machine makes answers late, but the server no slower.
A body names its run, as in ``{"run": "..."}``. The answer to ``{"stats": "..."}`` has the counts of
a run. The server prints its port, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import time
from dataclasses import asdict, dataclass


@dataclass
class Run:
    """The counts of a run's calls; times in seconds."""

    done: int = 0
    refused: int = 0
    began_s: float = 0.0
    ended_s: float = 0.0
    most: int = 0  # at once
    now: int = 0
    tokens: float = 1.0  # the calls that its rate allows at once, at the time `since_s`
    since_s: float = 0.0


class Server:
    """One server."""

    def __init__(self, service_s: float, slots: int, queue: int, rates: dict[str, float]) -> None:
        self.service_s, self.slots, self.queue, self.rates = service_s, slots, queue, rates
        self.ends_s: list[float] = []  # of the calls in slots or in line, soonest first
        self.runs: dict[str, Run] = {}

    def admit(self, now: float) -> float | None:
        """When a call will be done, or None if it is refused."""
        if not self.slots:
            return now + self.service_s
        while self.ends_s and self.ends_s[0] <= now:
            heapq.heappop(self.ends_s)
        if len(self.ends_s) >= self.slots + self.queue:
            return None
        # The slot of the call that is that many before it.
        ahead = heapq.nsmallest(len(self.ends_s) - self.slots + 1, self.ends_s)
        done = (ahead[-1] if ahead else now) + self.service_s
        heapq.heappush(self.ends_s, done)
        return done

    def within_rate(self, run: Run, rate: float | None, now: float) -> bool:
        """Whether the rate of a run allows a call."""
        if rate is None:
            return True
        run.tokens = min(max(1.0, rate / 10), run.tokens + (now - run.since_s) * rate)
        run.since_s = now
        allowed = run.tokens >= 1
        run.tokens -= allowed
        return allowed

    async def call(self, name: str) -> bytes:
        """Serve a call."""
        run, now = self.runs.setdefault(name, Run()), time.monotonic()
        run.began_s = run.began_s or now
        rate = self.rates.get(name.partition(" ")[0])
        done_s = self.admit(now) if self.within_rate(run, rate, now) else None
        if done_s is None:
            run.refused += 1
            return b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
        run.now += 1
        run.most = max(run.most, run.now)
        await asyncio.sleep(done_s - now)
        run.now -= 1
        run.done += 1
        run.ended_s = time.monotonic()
        return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, to its end."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                asked = json.loads(await reader.readexactly(length))
                if "stats" in asked:
                    body = json.dumps(asdict(self.runs[asked["stats"]])).encode()
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                    )
                else:
                    writer.write(await self.call(asked["run"]))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def main(service_ms: float, slots: int, queue: int, rates: dict[str, float]) -> None:
    """Serve until stdin ends."""
    serve = Server(service_ms / 1000, slots, queue, rates).serve
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    rates = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), rates))
