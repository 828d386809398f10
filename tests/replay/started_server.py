"""Plugin: a small server that a study starts, `server.engine=small`. Run as a script, it is that server: PORT WORD…

Words: ends_before (exit at once), ends_at=N (exit at the N-th request), stays (a descendant that outlives SIGTERM),
says_goodbye (at SIGTERM).
"""

import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

if __name__ != "__main__":
    from spanlab.study.servers.base import SERVERS, EmbeddedServer, Launch

    @SERVERS.register("small")
    class Small(EmbeddedServer):
        """A server of the tests."""

        environment, version, reset_path = "none", "1", "/reset"

        def python(self) -> Path:
            return Path(sys.executable)

        def command(self, launch: Launch) -> list[str]:
            return ["python", "-I", __file__, str(launch.port), *launch.study.server.arguments]


class Handler(BaseHTTPRequestHandler):
    """Answers each prompt with as many tokens as it is asked for."""

    served = 0
    ends_at = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(json.dumps({"data": [{"id": "small"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        if self.path == "/reset":
            return self._reply(b"{}")
        Handler.served += 1
        if Handler.served == Handler.ends_at:
            print("out of luck", flush=True)
            os._exit(7)
        count = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        usage["prompt_tokens_details"] = {"cached_tokens": 0}
        events = [{"choices": [{"text": "x"}]}] * count + [{"choices": [], "usage": usage}]
        return self._reply(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))

    def _reply(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main(port: str, *words: str) -> None:
    if "stays" in words:
        ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", ignore, *words], start_new_session=True)
    if "says_goodbye" in words:
        signal.signal(signal.SIGTERM, lambda number, frame: (print("goodbye", flush=True), os._exit(0)))
    if "ends_before" in words:
        print("no memory for the model", flush=True)
        sys.exit(3)
    Handler.ends_at = next((int(word.partition("=")[2]) for word in words if word.startswith("ends_at=")), 0)
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
