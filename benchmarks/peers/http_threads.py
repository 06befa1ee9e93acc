"""A student behind the standard library's server, with a thread per connection and a forward per request."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import rbm


class Handler(BaseHTTPRequestHandler):
    """Answers POST; all errors are reported as the client's."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would delay each answer's body by 40 ms

    def do_POST(self):  # the name is given by the standard library
        """Answer ``{"x": [[...], ...]}``."""
        rows = torch.tensor(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["x"])
        with torch.inference_mode():
            probabilities = self.server.student(rows).softmax(-1)
        answer = {"classes": probabilities.argmax(-1).tolist(), "probabilities": probabilities.tolist()}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, *_):
        """Do not log requests."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    torch.set_num_threads(1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.student = rbm.load(parser.parse_args().run)
    print(f"http://127.0.0.1:{server.server_address[1]}/", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
