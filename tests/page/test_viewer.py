import json
import multiprocessing.util
import os
import socket
import threading
import time

import polars as pl
import pytest

from helpers.explored_runs import HOSTILE, run_of, table_of
from helpers.serving import Server, end_processes
from whence.cli.commands.report_command import view
from whence.core import WhenceError
from whence.page import ExploredRun, describe_runs
from whence.page.questions import Questions
from whence.page.server import serve
from whence.page.templates import LIBRARIES, read_library
from whence.runs import RunDirectory, write_flag
from whence.selection import FromMask


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    run_of(path / "lake", table_of(reason=[HOSTILE] * 60))
    run_of(path / "other")
    return path


@pytest.fixture(scope="module")
def server(path, questions):
    return Server([ExploredRun(path / "lake"), ExploredRun(path / "other", "the other")])


@pytest.fixture(autouse=True, scope="module")
def _no_answering_process_is_left():
    yield
    end_processes()


def wait_and_count(run, number, record, setting, check):
    """An answer: record 0 waits until it is ended, each other one is its number."""
    while record == 0:
        check()
        time.sleep(0.01)
    return {"record": record, "setting": setting, "process": os.getpid()}


@pytest.fixture(scope="module")
def starts():
    """What PYTHONSAFEPATH was as each process of `questions` started."""
    return []


@pytest.fixture(scope="module")
def questions(path, starts):
    """Questions to one process, which takes seconds to import all: all servers here ask it."""
    start = multiprocessing.util.spawnv_passfds

    def watch(*args):
        starts.append(os.environ.get("PYTHONSAFEPATH"))
        return start(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing.util, "spawnv_passfds", watch)
        questions = Questions()
        questions.ask(wait_and_count, ExploredRun(path / "lake"), 1, 3, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.page.server.Questions", lambda: questions)
        yield questions
    questions.close()


class TestRoutes:
    def test_the_page(self, server):
        response, body = server.request("/")
        assert response.status == 200
        assert response.getheader("content-type").startswith("text/html")
        assert b'"mode":"served"' in body
        assert b'id="round-0-1"' not in body
        response, body = server.request("/", "HEAD")
        assert (response.status, body) == (200, b"")

    def test_runs_rounds_records_and_figures(self, server):
        page = server.get("/api/page")
        assert [run["label"] for run in page["runs"]] == ["iif, seed 3", "the other"]
        assert server.get("/api/runs/1/rounds/1")["records"] == 60
        grid = server.get("/api/runs/1/rounds/1/records?page=2&size=7&sort=step&dir=desc&filter=score:<0&search=lo")
        assert grid.keys() == {"last_page", "last_row", "data", "records", "left_out"}
        assert server.get("/api/runs/0/rounds/1/records/17")["record"] == 17
        assert server.get("/api/figures")[0].keys() == {"title", "about", "figure"}
        pivot = server.get("/api/runs/0/rounds/1/pivot?by=action&by=keep")
        place = pivot["rows"].index("3"), pivot["columns"].index("dropped")
        (records,) = [cell[2] for cell in pivot["cells"] if tuple(cell[:2]) == place]
        picked = server.get("/api/runs/0/rounds/1/records?group=action:3&group=keep:dropped")
        assert {(row["action"], row["keep"]) for row in picked["data"]} == {("3", False)}
        assert picked["last_row"] == records
        assert server.get("/api/runs/0/findings").keys() == {"findings", "looked", "opens"}

    def test_two_runs_of_one_name_are_told_apart(self, path, monkeypatch):
        shown = []
        monkeypatch.setattr("whence.page.server.serve", lambda runs, **settings: shown.extend(runs))
        view(path / "lake", [path / "other"], browser=False)
        assert [run["label"] for run in describe_runs(shown)["runs"]] == [str(path / "lake"), str(path / "other")]

    def test_hostile_text_stays_json(self, server):
        response, body = server.request("/api/runs/0/rounds/1/records?size=1")
        assert response.getheader("content-type") == "application/json"
        assert response.getheader("x-content-type-options") == "nosniff"
        assert json.loads(body)["data"][0]["reason"] == HOSTILE

    def test_a_run_that_grows(self, path, server):
        run = run_of(path / "growing")
        live = Server([run])
        assert live.get("/api/page")["runs"][0]["rounds"] == [1]
        run.directory.write_round("records", 2, table_of(20))
        assert live.get("/api/page")["runs"][0]["rounds"] == [1, 2]
        assert live.get("/api/runs/0/rounds/2")["records"] == 20

    def test_a_damaged_round_does_not_end_the_server(self, path):
        run = run_of(path / "broken")
        (path / "broken" / "records" / "round_00001.parquet").write_bytes(b"PAR1")
        live = Server([run])
        assert live.get("/api/runs/0/rounds/1")["notes"]
        assert live.get("/api/runs/0/rounds/1/records")["data"] == []
        assert live.status("/api/runs/0/rounds/1/records/1") == 404
        assert live.status("/") == 200

    def test_a_failure_is_a_sentence(self, path, monkeypatch):
        live = Server([run_of(path / "failing")])
        monkeypatch.setattr("whence.page.server.build_round", lambda run, number: 1 / 0)
        assert live.status("/api/runs/0/rounds/1") == 503
        assert live.status("/api/page") == 200

    def test_libraries_have_addresses_of_their_own(self, server):
        page = server.request("/")[1].decode()
        for name in LIBRARIES:
            response, body = server.request(f"/assets/{name}.js")
            assert response.getheader("content-type").startswith("text/javascript")
            assert body.decode() == read_library(name)
            assert f'data-address="/assets/{name}.js"' in page
        assert len(page) < 400_000

    def test_a_later_search_of_all_rounds_ends_the_one_before(self, path, monkeypatch):
        run = run_of(path / "searched twice", rounds=(1, 2))
        live, waits, refusals = Server([run]), threading.Event(), []
        flagged, first = ExploredRun.flagged, threading.Event()

        def wait(run, number, **settings):
            if not first.is_set():
                first.set()
                waits.wait(20)
            return flagged(run, number, **settings)

        monkeypatch.setattr(ExploredRun, "flagged", wait)
        thread = threading.Thread(target=lambda: refusals.append(live.request("/api/runs/0/records?search=1")))
        thread.start()
        assert first.wait(20)
        assert live.get("/api/runs/0/records?search=too+low")["last_row"] == 30
        waits.set()
        thread.join(20)
        ((response, body),) = refusals
        assert (response.status, json.loads(body)) == (400, {"error": "Another search began before this one ended."})

    def test_frames_do_not_wait_for_rollouts(self, server):
        address = "/api/runs/0/rounds/1/records/3"
        detail = server.get(address)
        assert detail["mc_pending"]
        assert detail["mc_advantage"] is None
        measured = server.get(f"{address}/advantage")
        assert measured["mc_advantage"] is None
        assert measured["mc_text"].startswith("Not measured by fresh rollouts: ")
        assert server.status("/api/runs/0/rounds/99/records/3/advantage") == 404


class TestQuestions:
    def test_a_later_question_ends_the_one_before(self, path, questions):
        run, ends = ExploredRun(path / "lake"), []

        def ask():
            with pytest.raises(WhenceError, match="another record was asked about"):
                questions.ask(wait_and_count, run, 1, 0, None)
            ends.append(True)

        before = questions._newest.value
        thread = threading.Thread(target=ask)
        thread.start()
        while questions._newest.value == before:
            time.sleep(0.01)
        answer = questions.ask(wait_and_count, run, 1, 7, "x")
        thread.join(20)
        assert ends == [True]
        assert (answer["record"], answer["setting"]) == (7, "x")
        assert answer["process"] != os.getpid()

    def test_answers_are_remembered_until_the_run_changes(self, path, questions):
        run = run_of(path / "changing")
        first = questions.ask(wait_and_count, run, 1, 3, None)
        assert questions.ask(wait_and_count, run, 1, 3, None) is first
        run.directory.write_round("records", 1, table_of(20))
        assert questions.ask(wait_and_count, run, 1, 3, None) is not first

    def test_their_process_imports_nothing_from_the_working_directory(self, questions, starts):
        assert {*starts} == {"1"}  # of the first one's, and of the tracker of shared memory if it did not run
        assert "PYTHONSAFEPATH" not in os.environ


class TestRefusals:
    @pytest.mark.parametrize(
        ("address", "status"),
        [
            ("/api/runs/2/rounds/1", 404),
            ("/api/runs/-1/rounds/1", 404),
            ("/api/runs/0/rounds/9", 404),
            ("/api/runs/0/rounds/1/records/999", 404),
            ("/api/runs/0/rounds/1e3", 404),
            ("/api/runs/0/rounds/%EF%BC%91", 404),
            ("/api/runs/0/rounds/99999999999999999999", 404),
            ("/api/runs/0/rounds/1/records?sort=__class__", 400),
            ("/api/runs/0/rounds/1/records?page=0", 400),
            ("/api/runs/0/rounds/1/records?size=100000", 400),
            ("/api/runs/0/rounds/1/records?filter=score:many", 400),
            ("/api/runs/0/rounds/1/records?group=observation:x", 400),
            ("/api/runs/0/rounds/1/pivot?by=action&by=action", 400),
            ("/../../etc/passwd", 404),
            ("/%2e%2e/config.json", 404),
            ("/assets/../page.py", 404),
        ],
    )
    def test_addresses(self, server, address, status):
        assert server.status(address) == status

    @pytest.mark.parametrize(
        "host",
        [
            *("evil.example", "evil.example:{port}", "127.0.0.1.evil.example:{port}", "evil@127.0.0.1:{port}"),
            *("[::1", "0.0.0.0:{port}", "localhost.:{port}", "2130706433:{port}"),
            *("127.0.0.1:{port}", "localhost:{port}"),
        ],
    )
    def test_hosts(self, server, host):
        expected = 200 if host in ("127.0.0.1:{port}", "localhost:{port}") else 400
        for address in ("/api/page", "/"):
            assert server.status(address, host=host.format(port=server.port)) == expected

    def test_two_hosts_or_none(self, server):
        def send(lines):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                text = "\r\n".join(["GET /api/page HTTP/1.1", *lines, "Connection: close", "", ""])
                connection.sendall(text.encode())
                return connection.recv(100).split()[1]

        here = f"Host: 127.0.0.1:{server.port}"
        assert send([here]) == b"200"
        assert send([here, "Host: evil.example"]) == b"400"
        assert send([]) == b"400"

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "X"])
    def test_methods_that_write(self, server, method):
        assert server.status("/api/page", method) == 403
        response, _ = server.request("/api/page", method, **server.page_headers)
        assert response.status == 405
        assert {*response.getheader("allow").split(", ")} == {"GET", "HEAD"}
        assert response.getheader("access-control-allow-origin") is None

    def test_flags_are_written_by_the_page_alone(self, path, server):
        address, note = "/api/runs/0/rounds/1/records/17/flag", json.dumps({"note": HOSTILE}).encode()
        for name, value in (
            *(("Origin", "http://evil.example"), ("Content_Type", "text/plain")),
            ("Sec_Fetch_Site", "cross-site"),
        ):
            assert server.status(address, "PUT", body=note, **server.page_headers | {name: value}) == 403
        assert not (path / "lake" / "flags.parquet").exists()
        for body, status in ((b"{}", 400), (b"[", 400), (b'{"note": 1}', 400), (b" " * 9000, 413), (note, 200)):
            assert server.status(address, "PUT", body=body, **server.page_headers) == status
        assert server.status(address.replace("17", "999"), "PUT", body=note, **server.page_headers) == 404
        flags = RunDirectory.open(path / "lake").flags()
        assert flags.rows() == [(1, 17, HOSTILE)]
        assert FromMask(path / "lake").ids == (17,)
        assert server.get("/api/runs/0/rounds/1/records/17")["flag"] == HOSTILE
        (row,) = server.get("/api/runs/0/rounds/1/records?only=flagged")["data"]
        assert (row["record_id"], row["flag"]) == (17, f"⚑ {HOSTILE}")
        assert server.status(address, "PUT", body=b'{"note": null}', **server.page_headers) == 200
        assert RunDirectory.open(path / "lake").flags().is_empty()

    def test_what_a_search_finds_is_flagged_at_once(self, path):
        run = run_of(path / "searched", rounds=(1, 2))
        server = Server([run])
        write_flag(run.directory.path, 2, 21, "mine")

        def flags():
            return {(number, record): note for number, record, note in run.directory.flags().rows()}

        def write(address, note):
            response, body = server.request(
                address, "PUT", body=json.dumps({"note": note}).encode(), **server.page_headers
            )
            return json.loads(body)["records"] if response.status == 200 else response.status

        in_run, in_round = "/api/runs/0/flags?filter=step:1&where=action%3D1", "/api/runs/0/rounds/1/flags?search=too"
        # Records 1, 21 and 41 of both rounds; one of them has a note, which stays.
        found = {(number, record) for number in (1, 2) for record in (1, 21, 41)}
        assert write(in_run, "odd") == 5
        assert flags() == {place: "mine" if place == (2, 21) else "odd" for place in found}
        assert server.get("/api/runs/0/records?filter=step:1&where=action%3D1&only=flagged")["last_row"] == 6
        dropped = {(1, record) for record in table_of().filter(~pl.col("keep"))["record_id"]}
        assert write(in_round, "") == len(dropped - found)
        assert flags().keys() == dropped | found
        assert write(f"{in_run}&only=flagged", None) == 6
        assert flags().keys() == dropped - found
        assert write("/api/runs/0/flags?where=nope", "x") == 400
        assert write("/api/runs/0/rounds/9/flags?search=x", "x") == 404
        assert server.status(in_run, "PUT", body=b'{"note": "x"}') == 403
        assert server.status(in_run, "PUT", body=b'{"note": 1}', **server.page_headers) == 400
        assert flags().keys() == dropped - found

    @pytest.mark.parametrize(
        "headers",
        [
            *({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"}),
            *({"Origin": "https://127.0.0.1"}, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"}),
        ],
    )
    def test_other_sites(self, server, headers):
        assert server.status("/api/page", **headers) == 403

    def test_its_own_page(self, server):
        origin = f"http://127.0.0.1:{server.port}"
        assert server.status("/api/page", Origin=origin, Sec_Fetch_Site="same-origin") == 200
        assert server.status("/", Sec_Fetch_Site="cross-site") == 200  # a link that was shared

    def test_security_headers_on_every_answer(self, server):
        for request in (["/"], ["/nothing"], ["/", "POST"], ["/", "GET", "x"]):
            response, _ = server.request(*request)
            policy = response.getheader("content-security-policy")
            assert policy.startswith("default-src 'none';")
            assert "connect-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy
            assert response.getheader("x-content-type-options") == "nosniff"
            assert response.getheader("referrer-policy") == "no-referrer"
            assert response.getheader("cache-control") == "no-store"
            assert response.getheader("server") is None


def test_a_port_that_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(WhenceError, match="cannot be listened to"):
            serve([], port=taken.getsockname()[1])
