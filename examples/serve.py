"""A student behind HTTP, answering in as many threads as ask: ``python examples/serve.py RUN [PORT]``.

POST ``{"x": [[...], ...]}``, rows as ``rbm.load(RUN)`` takes them; back come ``classes`` and ``probabilities``.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import rbm


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which would hold each answer's body back for 40 ms

    def do_POST(self):
        try:
            rows = torch.tensor(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["x"])
            with torch.inference_mode():  # holds for this thread alone: each needs its own
                probabilities = self.server.student(rows.float()).softmax(-1)
            answer = {"classes": probabilities.argmax(-1).tolist(), "probabilities": probabilities.tolist()}
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            answer = {"error": f"expected rows of {self.server.student.in_channels} numbers under 'x': {error!r}"}
        body = json.dumps(answer).encode()
        self.send_response(400 if "error" in answer else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *_):
        """Silent: a line for each request would take longer than its answer."""


def make_server(student, port=8000):
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.student = student
    return server


if __name__ == "__main__":
    torch.set_num_threads(1)  # requests run side by side, not their sums
    make_server(rbm.load(sys.argv[1]), *map(int, sys.argv[2:])).serve_forever()
