"""A process that answers a quick check badly: `python -m tests.quick_child MODE DESCRIPTOR`."""

import os
import socket
import sys
import time

from raybench.health.quick.messages import receive, send

mode, descriptor = sys.argv[1:]
channel = socket.socket(fileno=int(descriptor))
if mode == "echo":
    while True:
        try:
            send(channel, receive(channel))
        except EOFError:
            break
elif mode == "half":
    # The head of a message of 100 bytes, and no more.
    channel.sendall((100).to_bytes(8, "little") + b"x")
    time.sleep(1000)
elif mode == "silent":
    time.sleep(1000)
elif mode == "dies":
    print("Xyz cannot be loaded", flush=True)
    os._exit(3)
