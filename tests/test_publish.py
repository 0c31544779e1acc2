"""Versions of the weights on disk: complete or not there, announced when they are, then deleted."""

import asyncio
import os

import jax
import numpy as np
import pytest
from fake_server import FakeServer, text_of
from test_hf import SMALL, make_params

from focus.engine import EngineError
from focus.engine.servers.fleet import Limits
from focus.engine.servers.sglang import SGLangEngine
from focus.formats import hf
from focus.learner.publish import Publisher


class Fleet:
    """Servers that note what they were told, and what was on disk then."""

    def __init__(self, *urls):
        self.reported = dict.fromkeys(urls)
        self.loaded, self.fails = [], False

    def versions(self):
        return self.reported

    def adapters(self):
        return {}

    async def load_weights(self, path, version):
        if self.fails:
            raise EngineError("no server has taken them")
        self.loaded.append((version, hf.load_checkpoint(path)))
        self.reported = dict.fromkeys(self.reported, version)


def directories(root):
    return sorted(entry.name for entry in root.iterdir())


def publisher(root, fleet, run=""):
    return Publisher(root, SMALL, fleet, dtype="float32", run=run)


async def test_servers_load_what_the_learner_has_and_the_old_version_goes(tmp_path):
    root, fleet = tmp_path / "weights", Fleet("a", "b")
    push = publisher(root, fleet)
    for step in range(3):
        params = make_params(SMALL, seed=step)
        await push(params, step)
        version, (config, loaded) = fleet.loaded[-1]
        assert version == f"v{step}" and config == SMALL
        jax.tree.map(np.testing.assert_array_equal, loaded, params)
        assert directories(root) == [f"v{step}"]


async def test_a_version_stays_as_long_as_a_server_reports_it(tmp_path):
    fleet = Fleet("a", "b")
    push = publisher(tmp_path, fleet)
    await push(make_params(SMALL), 0)

    async def load_all_but_b(path, version):
        fleet.reported["a"] = version

    fleet.load_weights = load_all_but_b
    await push(make_params(SMALL), 1)
    await push(make_params(SMALL), 2)
    assert directories(tmp_path) == ["v0", "v2"]
    fleet.reported["b"] = None  # it is gone
    await push(make_params(SMALL), 3)
    assert directories(tmp_path) == ["v3"]


async def test_a_resumed_run_writes_beside_what_servers_may_still_hold(tmp_path):
    """Trained again, v2 is another v2; a server that holds the first must not pass for current."""
    fleet = Fleet("a")
    first = publisher(tmp_path, fleet)
    await first(make_params(SMALL, seed=0), 1)
    await first(make_params(SMALL, seed=1), 2)
    (tmp_path / ".partial-v3").mkdir()  # killed while it was written
    again = publisher(tmp_path, fleet, run="a1")
    await again(make_params(SMALL, seed=0), 1)
    assert directories(tmp_path) == ["v1-a1"]
    assert [version for version, _ in fleet.loaded] == ["v1", "v2", "v1-a1"]


async def test_weights_that_no_server_takes_leave_the_old_ones(tmp_path):
    fleet = Fleet("a")
    push = publisher(tmp_path, fleet)
    await push(make_params(SMALL), 0)
    fleet.fails = True
    with pytest.raises(EngineError, match="no server"):
        await push(make_params(SMALL), 1)
    assert "v0" in directories(tmp_path)


async def test_files_and_names_are_on_disk_before_a_version_is_announced(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename

    def note_sync(fd):
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def note_rename(source, target):
        events.append(("rename", os.path.basename(target)))
        rename(source, target)

    class Noting(Fleet):
        async def load_weights(self, path, version):
            events.append(("load", version))

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    await publisher(tmp_path / "weights", Noting("a"))(make_params(SMALL), 7)
    assert events == [
        ("sync", "model.safetensors"),
        ("sync", "config.json"),
        ("sync", ".partial-v7"),
        ("rename", "v7"),
        ("sync", "weights"),
        ("load", "v7"),
    ]


async def test_the_event_loop_goes_on_while_files_are_written(tmp_path, monkeypatch):
    ticks, loop = [], asyncio.get_running_loop()
    written = asyncio.Event()

    def slow(*args, **kwargs):
        asyncio.run_coroutine_threadsafe(written.wait(), loop).result(timeout=10)
        os.makedirs(args[0])

    async def tick():
        while len(ticks) < 3:
            ticks.append(1)
            await asyncio.sleep(0)
        written.set()

    monkeypatch.setattr(hf, "save_checkpoint", slow)
    fleet = Fleet("a")
    fleet.load_weights = lambda path, version: asyncio.sleep(0)
    await asyncio.gather(publisher(tmp_path, fleet)(None, 0), tick())
    assert len(ticks) == 3


async def test_real_clients_of_real_sockets_take_it(tmp_path):
    """One of two servers is away; it keeps nothing on disk that it does not report."""
    async with FakeServer() as one, FakeServer() as other:
        limits = Limits(probe_every_s=0.05, connect_timeout_s=0.5, dead_after_s=5.0)
        client = SGLangEngine(
            [one.url, other.url], vocab_size=97, max_context=64, decode=text_of, limits=limits
        )
        async with client:
            push = publisher(tmp_path, client)
            await push(make_params(SMALL), 0)
            assert set(client.versions().values()) == {"v0"}
            await other.kill()
            await push(make_params(SMALL), 1)
            assert one.model.version == "v1"
            held = {"v1", *client.versions().values()} - {None}
            assert directories(tmp_path) == sorted(held)
            await other.start()
            async with asyncio.timeout(10):
                while set(client.versions().values()) != {"v1"}:
                    await asyncio.sleep(0.05)
            await push(make_params(SMALL), 2)
            assert directories(tmp_path) == ["v2"]
            assert other.model.version == "v2"
