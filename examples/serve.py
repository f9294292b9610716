"""A server in few lines: the standard library's HTTP server over a bundle; GET /ready for a probe, POST /encode.

python examples/serve.py dist/quickstart-0.1.0 --port 8000
curl -s localhost:8000/encode -d '{"input_ids": [[5, 6, 7, 8, 9, 10, 11, 12]]}'
"""

from __future__ import annotations

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import aotpack_runtime as apr


def make_handler(session: apr.Session) -> type[BaseHTTPRequestHandler]:
    encoder = session["encoder"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = session.status()
            self._answer(200 if status["ready"] else 503, status)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                ids = torch.tensor(json.loads(body)["input_ids"])
                with torch.inference_mode():
                    embedding = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))
                self._answer(200, {"embedding": embedding.tolist()})
            except (apr.AotpackError, LookupError, RuntimeError, TypeError, ValueError) as error:
                self._answer(400, {"error": f"{type(error).__name__}: {error}"})

        def _answer(self, code: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    session = apr.load(options.bundle)
    session.warmup()
    server = ThreadingHTTPServer((options.host, options.port), make_handler(session))
    print(f"serving {options.bundle} on {options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
