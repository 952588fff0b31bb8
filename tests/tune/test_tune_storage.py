from __future__ import annotations

import importlib.util
import math
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from wsgiref.util import setup_testing_defaults

import optuna
import pytest

from weft.errors import TuneError
from weft.space import Space
from weft.tune.study.definition import define
from weft.tune.study.storage import Direction, TrialRecord, default_url
from weft.tune.study.study import Study

PASSWORD = "s3cret-word"


def small() -> Space:
    space = Space()
    space.real("momentum", 0.0, 0.9, when=space.categorical("kind", ["sgd", "adam"]) == "sgd")
    space.integer("width", [16, 32, 64])
    return space


def opened(url: str, resume: bool = False, trials: int = 8, objectives: int = 1) -> Study:
    directions: tuple[Direction, ...] = ("minimize", "maximize")
    sampler, pruner = {"name": "tpe", "n_startup_trials": 2}, {"name": "median", "n_startup_trials": 1}
    definition = define(small(), directions[:objectives], seed=3, max_concurrent=3, sampler=sampler, pruner=pruner)
    return Study.open("digits", definition, trials=trials, storage=url, resume=resume)


def play(study: Study, seed: int, upto: int = 1000) -> list[TrialRecord]:
    """Up to three trials at once, each with two reports, going on in an order of the seed."""
    rng = random.Random(seed)
    objectives = len(study.definition.directions)
    open_ones = {one.number: one.params for one in study.open_trials()}
    for _ in range(upto):
        if study.finished():
            break
        while len(open_ones) < 3 and study.askable() is not None:
            asked = study.ask()
            open_ones[asked.number] = asked.params
        number = rng.choice(sorted(open_ones))
        values = (number % 5 + open_ones[number].get("momentum", 0.5), -float(number % 3))[:objectives]  # type: ignore[operator]
        if study.report(number, 10, [value + 1 for value in values]):
            study.tell(number, "pruned")
        elif number == 1:
            study.tell(number, "failed", info={"error": "ValueError: no"})
        else:
            study.report(number, 20, values)
            study.tell(number, "complete", values, info={"fit": {"way": "whole", "memory": 7}})
        del open_ones[number]
    return study.trials()


# -- SQLite


def test_what_a_study_writes_optuna_and_its_dashboard_read_as_their_own(tmp_path: Path) -> None:
    url = default_url(tmp_path)
    with opened(url) as study:
        records = play(study, 0)
        best = study.best()[0]
    theirs = optuna.load_study(study_name="digits", storage=url)
    assert [trial.number for trial in theirs.trials] == list(range(8))
    names = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    for trial, record in zip(theirs.trials, records, strict=True):
        assert trial.params == record.params
        assert trial.state.name == names[record.state]
        assert trial.values == (None if record.values is None else list(record.values))
        assert trial.intermediate_values == {step: values[0] for step, values in record.reports.items()}
        assert trial.user_attrs == record.info
        assert trial.datetime_start is not None
        assert trial.datetime_complete is not None
    assert {record.state for record in records} >= {"complete", "failed"}
    assert (theirs.best_trial.number, theirs.best_params) == (best.number, best.params)
    dashboard = pytest.importorskip("optuna_dashboard")
    told: list[str] = []
    environ: dict[str, object] = {"PATH_INFO": "/api/studies"}
    setup_testing_defaults(environ)
    body = b"".join(dashboard.wsgi(url)(environ, lambda status, *_: told.append(status)))
    assert told == ["200 OK"]
    assert b"digits" in body


def test_several_objectives_keep_every_report_even_those_that_json_cannot_write(tmp_path: Path) -> None:
    url = default_url(tmp_path)
    told = {3: (0.1, math.inf), 1: (-math.inf, 1 / 3)}
    with opened(url, objectives=2) as study:
        study.ask()
        study.report(0, 1, told[1])
        study.report(0, 3, told[3])
        study.report(0, 5, (math.nan, 2.0))
    with opened(url, objectives=2, resume=True) as study:
        reports = dict(study.trials()[0].reports)
        assert math.isnan(reports[5][0])
        assert reports.pop(5)[1] == 2.0
        assert reports == told


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "no URL"),
        ("mysql://host/name", "a driver that is not installed"),
        ("sqlite:////no/such/folder/study.db", "unable to open"),
        (f"sqlite:///{__file__}", "not a database"),
        (f"postgresql://weft:{PASSWORD}@127.0.0.1:1/name", "127.0.0.1:1"),
    ],
)
def test_a_storage_that_cannot_be_reached_is_refused_in_one_line_without_the_password(url: str, said: str) -> None:
    with pytest.raises(TuneError, match=said) as caught:
        opened(url)
    assert "\n" not in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_a_path_may_have_spaces_braces_and_other_signs(tmp_path: Path) -> None:
    folder = tmp_path / "a {b} 100% #1"
    folder.mkdir()
    with opened(default_url(folder)) as study:
        study.ask()
    assert [path.suffix for path in folder.iterdir()] == [".db"]


def test_a_locked_file_is_waited_for(tmp_path: Path) -> None:
    with opened(default_url(tmp_path)) as study:
        study.ask()
        other = sqlite3.connect(tmp_path / "study.db", check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        timer = threading.Timer(0.5, other.rollback)
        timer.start()
        study.report(0, 1, 0.5)
        timer.join()
        other.close()
        study.tell(0, "complete", 0.5)
    with opened(default_url(tmp_path), resume=True) as study:
        assert (study.trials()[0].values, dict(study.trials()[0].reports)) == ((0.5,), {1: (0.5,)})


def test_a_second_process_that_adds_a_trial_is_refused(tmp_path: Path) -> None:
    with opened(default_url(tmp_path)) as first, opened(default_url(tmp_path), resume=True) as second:
        first.ask()
        with pytest.raises(TuneError, match="was written by someone else"):
            second.ask()
        assert [one.number for one in first.trials()] == [0]


# -- PostgreSQL


class Server:
    """A PostgreSQL of our own on a free port; as root it runs under another user, since it refuses root."""

    def __init__(self, binaries: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="weft-postgres-"))
        self._binaries = binaries
        self._user = "nobody" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (self.folder / "word").write_text(PASSWORD)
        if self._user:
            for path in (self.folder, self.folder / "word"):
                shutil.chown(path, self._user)
        command = [self._binaries / "initdb", "-D", self.folder / "data", "-U", "weft", "--no-sync"]
        command += ["-A", "scram-sha-256", "--pwfile", self.folder / "word"]
        subprocess.run(command, check=True, capture_output=True, user=self._user, cwd=self.folder)

    @property
    def url(self) -> str:
        return f"postgresql://weft:{PASSWORD}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = ["-k", str(self.folder), "-p", str(self.port), "-h", "127.0.0.1", "-c", "fsync=off"]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self.folder / "data", *options],
                stdout=log,
                stderr=log,
                user=self._user,
                cwd=self.folder,
            )
        for _ in range(200):
            if self._process.poll() is not None:
                raise RuntimeError((self.folder / "log").read_text())
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.05)
        raise RuntimeError("the server does not answer")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(20)


def binaries() -> Path | None:
    """Debian's PostgreSQL, one on the path, or that of pgserver."""
    found = [*sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)]
    if which := shutil.which("postgres"):
        found.append(Path(which))
    if (package := importlib.util.find_spec("pgserver")) and package.origin:
        found.append(Path(package.origin).parent / "pginstall" / "bin" / "postgres")
    return next((path.parent for path in found if path.exists()), None)


@pytest.fixture(scope="module")
def server(require: Callable[[str, bool, str], None]) -> Iterator[Server]:
    pytest.importorskip("psycopg")
    found = binaries()
    require("postgres", found is not None, "no PostgreSQL here; install Debian's, or pip install pgserver")
    assert found is not None
    try:
        server = Server(found)
        server.start()
    except (subprocess.CalledProcessError, RuntimeError, OSError) as error:
        require("postgres", False, f"{found} does not start: {getattr(error, 'stderr', error)!r}")
    yield server
    server.stop()
    shutil.rmtree(server.folder)


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """The URL of a server without studies."""
    yield server.url
    optuna.delete_study(study_name="digits", storage=server.url.replace("postgresql:", "postgresql+psycopg:"))


def test_a_study_in_postgresql_is_the_study_in_sqlite(database: str, tmp_path: Path) -> None:
    with opened(default_url(tmp_path)) as study:
        expected = play(study, 1)
    with opened(database) as study:
        play(study, 2, upto=4)
    with opened(database, resume=True) as study:
        assert play(study, 3) == expected
        assert study.finished()
    with opened(database, resume=True) as study:
        assert study.trials() == expected
