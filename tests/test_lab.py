"""The laws of a lab: hosts reach each other, links are as slow as they say, and nothing is left behind."""

import doctest
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm

import offbeat.base.units
import offbeat.lab
import offbeat.lab.network
from offbeat.lab import Lab, parse_rate, unavailable
from offbeat.lab.job import list_cores, share_cores
from offbeat.lab.signals import collect_signals, exit_on_signals, hold_signals

# Every new lab removes what killed processes have left: one process runs all tests with labs.
pytestmark = [pytest.mark.xdist_group("lab"), pytest.mark.slow, pytest.mark.usefixtures("ctrl_c")]
NAMES = Path("/run/netns")
PYTHON = [sys.executable, "-c"]
_marks = itertools.count()


def why_not() -> str | None:
    """Ask the kernel itself, so that a lab that fails to open fails the tests."""
    if reason := unavailable():
        return reason
    name = f"probe-{os.getpid()}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None if probe.returncode == 0 else f"no network namespaces here: {probe.stderr.strip()}"


NO_LAB = why_not()
needs_lab = pytest.mark.skipif(NO_LAB is not None, reason=NO_LAB or "")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="signals and users are those of Linux")


def names(owner: int) -> set[str]:
    """The namespaces of a process."""
    found = {path.name for path in NAMES.iterdir()} if NAMES.exists() else set()
    return {name for name in found if name.startswith(f"offbeat-{owner}-")}


def sleepers(mark: str) -> int:
    """How many processes run `sleep mark`."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += path.read_bytes() == f"sleep\0{mark}\0".encode()
        except OSError:
            continue
    return count


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_cores_of_hosts() -> None:
    """Equally many, or all for all."""
    assert share_cores(1, [0, 1]) == [[0, 1]]
    assert share_cores(2, [3, 5]) == [[3], [5]]
    assert share_cores(4, [0, 1]) == [[0], [1], [0], [1]]
    assert share_cores(2, [0, 1, 2, 3, 4]) == [[0, 1], [2, 3]]
    assert share_cores(3, [0, 1]) == [[0, 1]] * 3


@needs_lab
def test_hosts_keep_to_their_cores() -> None:
    hosts = 2 * len(os.sched_getaffinity(0))
    with Lab(hosts) as lab:
        runs = lab.run([*PYTHON, "import os; print(os.sched_getaffinity(0))"], timeout=60)
    assert sorted(list_cores()) == sorted(os.sched_getaffinity(0))
    assert [run.stdout for run in runs] == [f"{set(own)}\n" for own in share_cores(hosts, list_cores())]


def alone(script: str) -> subprocess.Popen[str]:
    """Another process with a lab."""
    script = f"import os, signal, sys\nfrom offbeat.lab import Lab\n{script}"
    return warm.start("-c", script, stdout=None)


def sleep(mark: str) -> list[str]:
    """Two sleepers, one of which leaves its process group."""
    return ["sh", "-c", f"setsid sleep {mark} & exec sleep {mark}"]


@pytest.fixture
def mark() -> str:
    return f"3600.{os.getpid()}{next(_marks):03}"


@pytest.fixture
def holder(mark: str) -> Iterator[subprocess.Popen[str]]:
    """Another process in the midst of a run on two hosts."""
    reset = "for n in 1, 2, 15: signal.signal(n, signal.default_int_handler if n == 2 else signal.SIG_DFL)"
    with alone(f"{reset}\nwith Lab(2) as lab: lab.run({sleep(mark)})") as process:
        eventually(lambda: sleepers(mark) == 4 or process.poll() is not None)
        yield process
        process.kill()


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as lab:
        yield lab


# Arguments, on any system.


@pytest.mark.parametrize(
    ("rate", "bits"),
    [
        ("1000", 1000),
        ("8bit", 8),
        ("100mbit", 10**8),
        ("100MBit", 10**8),
        ("0.1gbit", 10**8),
        (".5kbit", 500),
        ("2.tbit", 2 * 10**12),
        ("10bps", 80),
        ("10kbps", 80_000),
        ("1KiBps", 8192),
        ("3mibit", 3 * 1024**2),
        ("1000tbit", 10**15),
    ],
)
def test_a_rate_is_bits_per_second(rate: str, bits: int) -> None:
    assert parse_rate(rate) == bits


@pytest.mark.parametrize(
    "rate", ["", "mbit", "100bananas", "100m", "-1mbit", "1e3bit", "1 mbit", "inf", "٣bit"]
)
def test_what_is_no_rate_is_said_in_a_sentence(rate: str) -> None:
    with pytest.raises(
        ValueError, match=f"^rate='{rate}': a rate is a number and a unit of tc, such as .*\\.$"
    ):
        parse_rate(rate)


def test_a_rate_is_positive_text() -> None:
    for rate in ("0mbit", "1001tbit", "1" + 30 * "0"):
        with pytest.raises(ValueError, match=rf"^rate='{rate}': a rate must be from 1bit to 1000tbit\.$"):
            parse_rate(rate)
    with pytest.raises(TypeError, match=r"^rate=100: a rate is text, such as '100mbit'\.$"):
        parse_rate(100)


def test_the_examples_of_rates_run() -> None:
    assert doctest.testmod(offbeat.base.units) == (0, 6)


@pytest.mark.parametrize(
    ("hosts", "rate", "sentence"),
    [
        (0, None, "Lab(hosts=0): hosts must be at least 1."),
        (-2, None, "Lab(hosts=-2): hosts must be at least 1."),
        (1024, None, "Lab(hosts=1024): a bridge has 1023 ports, one per host."),
        (2.5, None, "Lab(hosts=2.5): hosts must be a whole number."),
        (True, None, "Lab(hosts=True): hosts must be a whole number."),
        (2, "7999bit", "Lab(rate='7999bit'): rate must be from 8kbit to 100gbit, or None."),
        (2, "101gbit", "Lab(rate='101gbit'): rate must be from 8kbit to 100gbit, or None."),
    ],
)
def test_bad_values_are_said_in_a_sentence(hosts: int, rate: str | None, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Lab(hosts, rate=rate)
    assert str(caught.value) == sentence


def test_the_bounds_themselves_are_fine_and_a_banana_is_not() -> None:
    assert [Lab(1, rate="8kbit").rate, Lab(1023, rate="100gbit").rate] == ["8kbit", "100gbit"]
    with pytest.raises(ValueError, match=r"^rate='100bananas': "):
        Lab(2, rate="100bananas")


def test_a_lab_prints_as_typed_and_works_in_its_block_only() -> None:
    lab = Lab(4, rate="100mbit")
    assert repr(lab) == "Lab(4, rate='100mbit')"
    with pytest.raises(
        RuntimeError, match=r"^Lab\(4, rate='100mbit'\) is not open: use it in a `with` block\.$"
    ):
        lab.run(["true"])


def test_another_system_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"^A lab needs Linux, and this is darwin\.$"):
        Lab(2).__enter__()


@needs_linux
def test_without_root_it_is_said_in_a_sentence() -> None:
    with alone("if os.geteuid() == 0: os.setuid(65534)\nwith Lab(2): pass") as process:
        _, stderr = process.communicate(timeout=90)
    assert process.returncode == 1
    assert stderr.splitlines()[-1] == (
        "RuntimeError: A lab needs root (in a container, CAP_NET_ADMIN and CAP_SYS_ADMIN): run it with sudo."
    )


@needs_lab
def test_missing_tools_are_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RuntimeError, match=r"^A lab needs ip and tc of iproute2 on the PATH: .*\.$"):
        Lab(2).__enter__()


@needs_linux
def test_held_signals_arrive_after_the_block_and_the_rest_exit_with_their_number() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the block is the test)
        with hold_signals():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("went on")
    assert steps == ["went on"]
    with pytest.raises(SystemExit, match="143"), exit_on_signals(), hold_signals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@needs_linux
def test_a_signal_that_is_ignored_stays_so() -> None:
    """After `nohup`, the end of the terminal's session must not end the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with collect_signals() as caught:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# The network.

REACH = """
import os, socket, time
rank, addresses = int(os.environ["RANK"]), os.environ["ADDRESSES"].split()
listener = socket.create_server((addresses[rank], 7000))
loopback = socket.create_server(("127.0.0.1", 0))
socket.create_connection(loopback.getsockname()).close()
for address in addresses:
    while True:
        try:
            socket.create_connection((address, 7000), timeout=20).sendall(bytes([rank]))
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
greetings = [listener.accept()[0].recv(1)[0] for _ in addresses]
print(sorted(greetings), sorted(os.listdir("/sys/class/net")))
"""

# Every other rank connects to rank 0, and the one side sends `SIZE` bytes over each connection to the other.
# Each prints what it received and what TCP sent, which is more than `SIZE` if some had to be sent twice.
TRANSFER = """
import os, socket, struct, threading, time
rank, others, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1, int(os.environ["SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

def transfer(connection):
    if (rank == 0) == (os.environ["ZERO"] == "sends"):
        connection.sendall(bytes(size))
        connection.shutdown(socket.SHUT_WR)
    received = sum(iter(lambda: len(connection.recv(1 << 16)), 0))
    tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    print(received, *struct.unpack_from("Q", tcp_info, 200))  # tcpi_bytes_sent

def connect():
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.01)

if rank == 0:
    listener = socket.create_server(address)
    threads = [threading.Thread(target=transfer, args=listener.accept()[:1]) for _ in range(others)]
    for thread in threads:
        thread.start()
else:
    transfer(connect())
"""


@needs_lab
def test_the_example_of_the_package_runs() -> None:
    assert doctest.testmod(offbeat.lab) == (0, 4)


@needs_lab
def test_every_host_reaches_every_other_and_sees_nothing_else(lab: Lab) -> None:
    runs = lab.run([*PYTHON, REACH], env={"ADDRESSES": " ".join(lab.addresses)}, timeout=60)
    assert [run.stderr for run in runs] == ["", "", ""]
    assert [run.stdout for run in runs] == ["[0, 1, 2] ['eth0', 'lo']\n"] * 3
    assert lab.addresses == ("198.18.0.1", "198.18.0.2", "198.18.0.3")


BUCKET = 262_144  # bytes that a link lets pass at once, before the rate holds


@needs_lab
def test_a_transfer_takes_its_time_and_the_kernel_counts_its_bytes() -> None:
    size, rate = 3_000_000, 50_000_000
    with Lab(2, rate="50mbit") as lab:
        first, again = (
            lab.run([*PYTHON, TRANSFER], env={"SIZE": str(size), "ZERO": "receives"}, timeout=60)
            for _ in range(2)
        )
    for receiver, sender in (first, again):
        assert (receiver.stdout, receiver.stderr, sender.stderr) == (f"{size} 0\n", "", "")
        assert receiver.seconds > (size - BUCKET) * 8 / rate
        payload = int(sender.stdout.split()[1])
        assert size <= payload < sender.sent < 1.05 * payload
        assert size < receiver.received < 1.05 * payload
        assert 0 < receiver.sent < 0.5 * size
        assert 0 < sender.received < 0.5 * size


@needs_lab
@pytest.mark.parametrize("zero", ["sends", "receives"])
def test_a_link_that_two_share_takes_the_time_of_both(zero: str) -> None:
    """Both ends are shaped: rank 0's own when it sends to two hosts, the switch's when two send to it."""
    size, rate = 600_000, 16_000_000
    with Lab(3, rate="16mbit") as lab:
        runs = lab.run([*PYTHON, TRANSFER], env={"SIZE": str(size), "ZERO": zero}, timeout=60)
    assert [run.stderr for run in runs] == ["", "", ""]
    assert sum(int(line.split()[0]) for run in runs for line in run.stdout.splitlines()) == 2 * size
    assert max(run.seconds for run in runs) > (2 * size - BUCKET) * 8 / rate
    assert (runs[0].sent if zero == "sends" else runs[0].received) > 2 * size


@needs_lab
def test_rates_mean_what_tc_takes_them_for() -> None:
    rates = [
        f"3{scale}{unit}" for scale in ["k", "m", "g", "t", "Ki", "Mi", "Gi", "Ti"] for unit in ["bit", "bps"]
    ]
    rates += ["4000", "4000bit", "4000bps", "12.5mbit"]
    tbf = "tc qdisc replace dev eth0 root tbf burst 256kb latency 200ms rate"
    lines = [f"{tbf} {rate} && tc -j qdisc show dev eth0 && echo" for rate in rates]
    with Lab(1) as lab:
        (run,) = lab.run(["sh", "-ec", "\n".join(lines)], timeout=60)
    shown = [json.loads(line)[0]["options"]["rate"] for line in run.stdout.split("\n") if line.strip()]
    assert shown == [parse_rate(rate) // 8 for rate in rates]


@needs_lab
def test_two_labs_at_once_do_not_collide(lab: Lab, holder: subprocess.Popen[str]) -> None:
    """One in this process, one in another; the addresses are the same, the networks are not."""
    theirs = names(holder.pid)
    with Lab(3) as other:
        jobs = [
            each.start([*PYTHON, REACH], env={"ADDRESSES": " ".join(lab.addresses)}) for each in (lab, other)
        ]
        for job in jobs:
            assert [run.stdout[:9] for run in job.wait(timeout=60)] == ["[0, 1, 2]"] * 3
    assert len(theirs) == 3
    assert names(holder.pid) == theirs
    assert holder.poll() is None


@needs_lab
@pytest.mark.slow
def test_gloo_sums_over_the_hosts(lab: Lab) -> None:
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.full((250_000,), float(dist.get_rank() + 1))
dist.all_reduce(ones)
assert (ones == 6).all()
print(ones.sum().item())
dist.destroy_process_group()
"""
    with warm.on_hosts():
        runs = lab.run([*PYTHON, script], timeout=120)
    assert [(run.returncode, run.stdout) for run in runs] == [(0, "1500000.0\n")] * 3, runs[0].stderr
    ring = 2 * 2 / 3 * 1_000_000
    assert all(ring < run.sent < 1.5 * ring for run in runs)


# Jobs.


@needs_lab
def test_the_environment_is_torchruns(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OURS", "kept")
    show = [*PYTHON, "import json, os; print(json.dumps(dict(os.environ)))"]
    ports = set()
    for run in lab.run(show, env={"THEIRS": "added"}, timeout=60):
        environment = json.loads(run.stdout)
        ports.add(environment["MASTER_PORT"])
        expected = {
            "MASTER_ADDR": "198.18.0.1",
            "RANK": str(run.rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "OURS": "kept",
            "THEIRS": "added",
        }
        assert expected.items() <= environment.items()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    again = json.loads(lab.run(show, env={"RANK": "won"}, timeout=60)[0].stdout)
    assert (again["OMP_NUM_THREADS"], again["RANK"]) == ("3", "won")
    assert len(ports | {again["MASTER_PORT"]}) == 2


@needs_lab
def test_long_outputs_are_whole_and_silent_hosts_send_nothing(lab: Lab) -> None:
    long = 'import sys; sys.stdout.write("o" * 10**6); sys.stderr.write("ü" * 10**6)'
    for run in lab.run([*PYTHON, long], timeout=60):
        assert run.stdout == "o" * 10**6
        assert run.stderr == "ü" * 10**6
    with Lab(2) as idle:
        assert [(run.sent, run.received) for run in idle.run(["true"], timeout=60)] == [(0, 0), (0, 0)]


@needs_lab
def test_a_host_that_fails_is_reported_and_the_others_go_on(lab: Lab) -> None:
    runs = lab.run(["sh", "-c", '[ $RANK != 1 ] && exec sleep 0.2; echo "no disk" >&2; exit 3'], timeout=60)
    assert [run.returncode for run in runs] == [0, 3, 0]
    assert [run.stderr for run in runs] == ["", "no disk\n", ""]
    assert runs[0].seconds >= 0.2
    for run in lab.run(["no-such-command"], timeout=60):
        assert run.returncode != 0
        assert "no-such-command" in run.stderr


@needs_lab
def test_kill_ends_one_host_with_its_whole_group(lab: Lab, mark: str) -> None:
    job = lab.start(["sh", "-c", f"sleep {mark}; true"])
    eventually(lambda: sleepers(mark) == 3)
    job.kill(rank=2)
    eventually(lambda: job.running == (0, 1) and sleepers(mark) == 2)
    job.kill()
    job.kill(rank=2)
    assert [run.returncode for run in job.wait(timeout=60)] == [-9, -9, -9]
    eventually(lambda: sleepers(mark) == 0)


@needs_lab
def test_delay_stops_a_host_for_its_time_and_of_two_the_longer_counts(lab: Lab, tmp_path: Path) -> None:
    """Each host prints a line when it is resumed and, at the end, how long it was away at most."""
    script = """
import os, signal, time
signal.signal(signal.SIGCONT, lambda number, frame: print("resumed", flush=True))
print("began", flush=True)
longest, last = 0, time.monotonic()
while not os.path.exists(os.environ["END"]):
    time.sleep(0.001)
    now = time.monotonic()
    longest, last = max(longest, now - last), now
print(longest)
"""
    job = lab.start([*PYTHON, script], env={"END": str(tmp_path / "end")})
    eventually(lambda: all(job.stdout(rank=rank) for rank in range(3)))
    job.delay(rank=0, seconds=1.0)
    job.delay(rank=0, seconds=0.5)
    job.delay(rank=1, seconds=0.5)
    job.delay(rank=1, seconds=1.0)
    eventually(lambda: all("resumed" in job.stdout(rank=rank) for rank in range(2)))
    (tmp_path / "end").touch()
    words = [run.stdout.split() for run in job.wait(timeout=60)]
    assert [said[:-1] for said in words] == [["began", "resumed"], ["began", "resumed"], ["began"]]
    assert min(float(said[-1]) for said in words[:2]) > 0.99
    job.delay(rank=0, seconds=0.1)
    assert job.stdout(rank=0).split() == words[0]


@needs_lab
def test_a_job_takes_its_own_ranks_and_commands_as_lists_only(lab: Lab) -> None:
    job = lab.start(["true"])
    with pytest.raises(ValueError, match=r"^job\.kill\(rank=3\): the ranks are 0 to 2\.$"):
        job.kill(rank=3)
    with pytest.raises(ValueError, match=r"^job\.delay\(rank=-1\): the ranks are 0 to 2\.$"):
        job.delay(rank=-1, seconds=1)
    with pytest.raises(ValueError, match=r"^job\.delay\(rank=0, seconds=0\): seconds must be positive\.$"):
        job.delay(rank=0, seconds=0)
    for command in ("python train.py", []):
        with pytest.raises(
            TypeError, match=r"^command=.*: a command is a list, such as \['python', 'train.py'\]\.$"
        ):
            lab.start(command)
    assert job.wait(timeout=60) is job.wait()


@needs_lab
def test_waiting_in_vain_says_who_runs_and_who_failed(lab: Lab, mark: str) -> None:
    script = f'[ $RANK = 0 ] && exec sleep {mark}; printf "why\\nwhere\\nboom\\n" >&2; exit $((4 - 2 * RANK))'
    job = lab.start(["sh", "-c", script])
    eventually(lambda: job.running == (0,))
    with pytest.raises(TimeoutError) as caught:
        job.wait(timeout=0.01)
    assert str(caught.value) == "Still running after 0.01 s: rank 0. Rank 1 had ended with 2: boom"
    assert job.running == (0,)
    job.kill()
    assert [run.returncode for run in job.wait(timeout=60)] == [-9, 2, 0]
    with pytest.raises(TimeoutError, match=r"^Still running after 0\.2 s: rank 0, 1, 2\.$"):
        lab.run(["sleep", mark], timeout=0.2)
    assert sleepers(mark) == 0


@needs_lab
def test_an_interrupted_wait_leaves_the_job_running(lab: Lab, mark: str) -> None:
    job = lab.start(["sleep", mark])
    interrupt = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the signal may come before the wait)
        interrupt.start()
        job.wait(timeout=60)
    assert job.running == (0, 1, 2)
    job.kill()
    assert [run.returncode for run in job.wait(timeout=60)] == [-9, -9, -9]


# Nothing is left behind.


@needs_lab
def test_all_is_removed_after_the_block_and_after_an_exception(mark: str) -> None:
    before = names(os.getpid())
    with Lab(2, rate="100mbit") as lab:
        assert len(names(os.getpid()) - before) == 3
        with pytest.raises(RuntimeError, match="is already open"):
            lab.__enter__()
        ended = lab.start(["true"])
        eventually(lambda: ended.running == ())
        killed = lab.start(sleep(mark))
        eventually(lambda: sleepers(mark) == 4)
    assert names(os.getpid()) == before
    assert sleepers(mark) == 0
    assert [run.returncode for job in (ended, killed) for run in job.wait()] == [0, 0, -9, -9]
    with pytest.raises(ZeroDivisionError), lab:
        print(lab.start(sleep(mark)).running[0] / 0)
    assert names(os.getpid()) == before
    assert sleepers(mark) == 0


@needs_lab
def test_a_lab_that_fails_to_open_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(os.getpid())
    monkeypatch.setattr(offbeat.lab.network, "INTERFACE", "a-name-too-long-for-linux")
    with pytest.raises(RuntimeError, match=r"^`ip -n offbeat-\S+-switch -batch -` failed: .*name"):
        Lab(2).__enter__()
    assert names(os.getpid()) == before


@needs_lab
@pytest.mark.parametrize(("number", "status"), [("SIGINT", -2), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_all_is_removed_after_a_signal(
    holder: subprocess.Popen[str], mark: str, number: str, status: int
) -> None:
    assert len(names(holder.pid)) == 3
    holder.send_signal(getattr(signal, number))
    _, stderr = holder.communicate(timeout=90)
    assert holder.returncode == status, stderr
    assert names(holder.pid) == set()
    assert sleepers(mark) == 0


@needs_lab
def test_the_next_lab_removes_what_a_killed_process_left(holder: subprocess.Popen[str], mark: str) -> None:
    holder.kill()
    holder.wait()
    assert len(names(holder.pid)) == 3
    assert sleepers(mark) == 4
    with Lab(1):
        assert names(holder.pid) == set()
        eventually(lambda: sleepers(mark) == 0)


@needs_lab
def test_a_lab_never_left_is_removed_when_its_process_ends() -> None:
    with alone("lab = Lab(1)\nlab.__enter__()") as process:
        assert process.communicate(timeout=90)[1] == ""
    assert names(process.pid) == set()


@needs_lab
def test_a_fork_does_not_remove_its_parents_lab() -> None:
    script = """
with Lab(1) as lab:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        assert lab.run(["true"])[0].returncode == 0
if child == 0: os._exit(0)
assert not [name for name in os.listdir("/run/netns") if f"-{os.getpid()}-" in name]
"""
    with alone(script) as process:
        assert process.communicate(timeout=90)[1] == ""
    assert process.returncode == 0


@needs_lab
def test_a_lab_works_in_any_thread_and_a_handler_already_set_stays() -> None:
    returncodes = []

    def work() -> None:
        with Lab(1) as lab:
            returncodes.append(lab.run(["true"], timeout=60)[0].returncode)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert returncodes == [0]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Lab(1):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@needs_lab
def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    """As docs/machines.md has it: an agent on each host, two workers under each."""
    root = Path(__file__).parent.parent
    words = "--nnodes 2 --node-rank {RANK} --nproc-per-node 2 --master-addr {MASTER_ADDR} --master-port 29600"
    (tmp_path / "agent.py").write_text(
        "import os\n"
        "from torch.distributed.run import main\n"
        f"main({words!r}.format(**os.environ).split() + ['{root}/examples/minimal.py'])\n"
    )
    environment = {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    with Lab(2, rate="1gbit") as lab, warm.on_hosts():
        first, second = lab.run([sys.executable, str(tmp_path / "agent.py")], env=environment, timeout=300)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "weights [1.0, 2.0, 3.0," in first.stdout
