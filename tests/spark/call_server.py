"""An HTTP server that throttles, stalls and dies, in a process of its own.

    python call_server.py dies_after

It answers a POST of an id with that id after 5 ms.  Every seventh of the ids it refuses at first,
by 429 with a Retry-After; every 29th it leaves without an answer, once.  After so many requests
in all it ends without a word (0: it never does).  It prints its port, and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import os
import sys

seen: dict[int, int] = {}
out = most = requests = 0


async def serve(reader, writer, dies_after):
    """A connection, to its end."""
    global out, most, requests
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            requests += 1
            if requests == dies_after:
                os._exit(0)
            if body == b"most":
                answer(writer, b"200 OK", b"%d %d" % (most, requests))
                continue
            n = int(body)
            times = seen[n] = seen.get(n, 0) + 1
            if times == 1 and n % 7 == 0:
                answer(writer, b"429 Too Many Requests\r\nRetry-After: 0.1", b"")
                continue
            if times == 1 and n % 29 == 0:
                await asyncio.sleep(3600)
            out += 1
            most = max(most, out)
            await asyncio.sleep(0.005)
            out -= 1
            answer(writer, b"200 OK", body)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def answer(writer, status, body):
    """Write an answer."""
    writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


async def main(dies_after):
    """Serve until stdin ends."""
    server = await asyncio.start_server(
        lambda reader, writer: serve(reader, writer, dies_after), "127.0.0.1", 0
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
