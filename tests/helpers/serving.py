"""The server of a page in a thread, and requests as they are written."""

import http.client
import json
import multiprocessing.util
import threading
import time

from whence.page.server import serve


class Server:
    """A server in a thread, and requests as they are written."""

    def __init__(self, runs):
        self.started = threading.Event()
        self.url = None
        self.thread = threading.Thread(target=serve, args=(runs,), kwargs={"on_start": self._start}, daemon=True)
        self.thread.start()
        assert self.started.wait(20)
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def _start(self, url):
        self.url = url
        self.started.set()

    @property
    def page_headers(self):
        """What the page's own script sends when it writes."""
        return {"Origin": f"http://127.0.0.1:{self.port}", "Content_Type": "application/json"}

    def request(self, path, method="GET", host=None, body=b"", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        if host is not False:
            connection.putheader("Host", f"127.0.0.1:{self.port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body or None)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response, body

    def get(self, path, **headers):
        response, body = self.request(path, **headers)
        assert response.status == 200, body
        return json.loads(body)

    def status(self, path, *args, **headers):
        response, body = self.request(path, *args, **headers)
        assert b"Traceback" not in body
        if response.status >= 400 and response.getheader("content-type") == "application/json" and body:
            assert set(json.loads(body)) == {"error"}
        return response.status


def end_processes():
    """End the processes of servers whose threads are not ended."""
    while processes := multiprocessing.active_children():  # their pools' threads wait for them, too
        for process in processes:
            process.kill()
        time.sleep(0.02)
