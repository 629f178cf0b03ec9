"""An HTTP server whose speed changes.

    python -m bench.flow_server seed seconds index port listen_at_ns

It serves what it is sent in order, one by one, as fast as consumer ``index`` of the simulated world
of that seed is at that time. A request's body has the run's zero on the machine's monotonic clock,
and the work. How long a request takes is computed, and waited for: a busy machine makes answers
late, but the server no slower, so that its capacity is known. While a consumer of an odd index
stalls, it says so, by 429 with a Retry-After in whole seconds; the others fall silent. It prints
its port, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time

from bench.flow_world import world_of


class Server:
    """One server."""

    def __init__(self, seed: int, seconds: float, index: int) -> None:
        self.speed = world_of(seed, seconds).speeds[index]
        self.announces = index % 2 == 1
        self.zero_ns, self.free_ns = 0, 0.0

    def admit(self, request: dict[str, float]) -> tuple[float, int]:
        """When a request will be done, on the monotonic clock; or how many seconds to wait."""
        if request["zero_ns"] != self.zero_ns:  # another run
            self.zero_ns, self.free_ns = int(request["zero_ns"]), 0.0
        now = time.monotonic_ns() - self.zero_ns
        stalled_ns = self.speed.stalled_until(now) - now
        if self.announces and stalled_ns > 0:
            return 0.0, math.ceil(stalled_ns / 1e9)
        self.free_ns = self.speed.finish_ns(max(now, self.free_ns), request["work"])
        return (self.zero_ns + self.free_ns) / 1e9, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection, to its end."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                until_s, retry_after = self.admit(json.loads(await reader.readexactly(length)))
                if retry_after:
                    status = b"429 Too Many Requests\r\nRetry-After: %d" % retry_after
                else:
                    await asyncio.sleep(until_s - time.monotonic())
                    status = b"200 OK"
                writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\n\r\n" % status)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


async def main(seed: int, seconds: float, index: int, port: int, listen_at_ns: int) -> None:
    """Serve from then on until stdin ends."""
    await asyncio.sleep((listen_at_ns - time.monotonic_ns()) / 1e9)
    server = await asyncio.start_server(Server(seed, seconds, index).serve, "127.0.0.1", port)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:])))
