"""An HTTP server that throttles, times out and charges, in a process of its own.

    python paid_server.py

After 20 ms the server answers a POST of ``{"id": n}`` with a label, the number of tokens and the
cost of 0.25, and charges it. Each tenant has a rate; calls above it are refused by 429. The first
call of every 40th id gets no answer. Every 50th id is a bad request. ``{"ask": 1}`` returns the
charges by id, the number of refused calls, and the number of other open connections. The server
prints its port, and ends when its stdin ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter

#: Calls per second, by tenant; None if a body names none.
RATES = {None: 60, "small": 5, "middle": 20, "large": 100}
charged: Counter[int] = Counter()
refused: Counter[str | None] = Counter()
hung: set[int] = set()
#: The times of the last calls, oldest first.
begun = {tenant: [0.0] * rate for tenant, rate in RATES.items()}
callers = 0


async def answer_of(body, reader):
    """Return the status and the object of an answer."""
    n, tenant = body["id"], body.get("tenant")
    now = time.monotonic()
    if now - begun[tenant][0] < 0.9:  # a network delivers calls unevenly
        refused[tenant] += 1
        return b"429 Too Many Requests\r\nRetry-After: 1", {}
    begun[tenant] = [*begun[tenant][1:], now]
    if n % 50 == 49:
        return b"400 Bad Request", {}
    if n % 40 == 39 and n not in hung:
        hung.add(n)
        await reader.read()  # until the caller gives up
        raise ConnectionError
    await asyncio.sleep(0.02)
    charged[n] += 1
    return b"200 OK", {"label": f"label {n}", "tokens": 30 + n % 20, "cost": 0.25}


async def serve(reader, writer):
    """Serve a connection until it ends."""
    global callers
    callers += 1
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            if "ask" in body:
                status, found = b"200 OK", {"charged": charged, "refused": refused.total()}
                found["callers"] = callers - 1
            else:
                status, found = await answer_of(body, reader)
            content = json.dumps(found).encode()
            writer.write(
                b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content)
            )
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
    finally:
        callers -= 1


async def main():
    """Serve until stdin ends."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main())
