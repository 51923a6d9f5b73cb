"""A meeting over TCP: rank 0 serves, every other rank connects, all prove that they know the job's secret.

A connection begins with the standard library's HMAC handshake, both ways, and goes on with its framed bytes;
nothing received is ever unpickled. Rank 0 gives each stranger a thread and a few seconds of its own, so that
one who says nothing, or rubbish, or does not know the secret delays nobody. Which ranks there are and what
the payload means is not known here.

    rank r -> 0   hello: rank, size, number of the call
    0 -> rank r   MISSING ranks, as they change; PAYLOAD once all are there, or FAILED / TIMED_OUT and why;
                  NOT_YET to a rank whose call is ahead of rank 0's
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import json
import queue
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from urllib.parse import parse_qsl, urlsplit

from .errors import (
    VERDICT_SECONDS,
    RendezvousError,
    RendezvousTimeoutError,
    SecretError,
    name_ranks,
    who_is_missing,
)
from .places import Place
from .secret import derive_key, insecure_is_allowed

MOST_BYTES = 1 << 20  # the longest payload: this shares identifiers, not data

_HELLO = struct.Struct("!8sIIQ")  # magic, rank, size, number of the call
_MAGIC = b"pynccl-1"
_PAYLOAD, _FAILED, _TIMED_OUT, _MISSING, _NOT_YET = b"P", b"E", b"T", b"M", b"L"

_HANDSHAKE_SECONDS = 5.0  # for a peer to prove itself; a real one needs milliseconds
_STRANGERS = 128  # unproven connections at a time; the oldest goes when one more comes
_BACKLOG = 1024  # connections that the kernel holds for us; beyond it, peers try again after a second
_SEND_SECONDS = 5.0  # for a stopped peer's full buffer
_NEWS_SECONDS = 0.25  # between two messages about the missing ranks
_NAME_SECONDS = (
    30.0  # a host name may appear late (a cluster's name service), but a misspelt one must not wait long
)
# For the greeting at a port; doubled, for a slow rank 0, when none came, up to what rank 0 itself would wait.
_PATIENCE, _LONGEST_PATIENCE = 1.0, _HANDSHAKE_SECONDS
_PAUSE, _LONGEST_PAUSE = 0.01, 0.5  # between two rounds over the ports

# What a handshake with a stranger may end in: closed or broken, rubbish (an AssertionError before Python
# 3.12, a ValueError or struct.error from odd lengths), a digest that does not match.
_NO_PEER = (OSError, EOFError, AuthenticationError, AssertionError, ValueError, struct.error)


@dataclasses.dataclass(frozen=True)
class Address:
    """`tcp://host:port?ports=N&job=TEXT`: rank 0 takes the first free one of N ports (1 if not given)."""

    url: str
    host: str
    ports: range
    job: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        last = f"-{self.ports[-1]}" if len(self.ports) > 1 else ""
        return f"{host}:{self.ports[0]}{last}"

    def resolve(self) -> list[tuple[socket.AddressFamily, str]]:
        """The host's addresses. Raises socket.gaierror."""
        found = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys((family, str(where[0])) for family, _, _, _, where in found))


def parse(url: str) -> Address:
    """Read a tcp:// URL; RendezvousError says what is wrong with it."""
    expected = "expected tcp://host:port, for example tcp://127.0.0.1:29500 or tcp://[::1]:29500"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        ports = int(query.pop("ports", "1"))
    except ValueError as error:
        raise RendezvousError(f"{url!r}: {error}; {expected}") from error
    job = query.pop("job", "")
    if not host or not port or query or parts.path not in ("", "/") or parts.username is not None:
        raise RendezvousError(f"{url!r}: {expected}; after ? only ports=N and job=TEXT")
    if ports < 1 or port + ports > 65536:
        raise RendezvousError(
            f"{url!r}: ports={ports}: ports {port} to {port + ports - 1} are not all in 1 to 65535"
        )
    return Address(url, host, range(port, port + ports), job)


def serve(
    payload: bytes, place: Place, address: Address, call: int, secret: bytes | None, deadline: float
) -> None:
    """Rank 0: wait for all other ranks, then give each the payload.

    Raises RendezvousTimeoutError naming the missing ranks, which those that did come are told too.
    """
    with contextlib.ExitStack() as cleanup:
        desk = _Desk(place, address, call, deadline, cleanup)
        desk.open(secret)
        try:
            desk.wait_for_all()
        except BaseException as error:
            timed_out = isinstance(error, TimeoutError)
            text = str(error) if isinstance(error, RendezvousError) else f"rank 0 gave up: {error!r}"
            desk.tell((_TIMED_OUT if timed_out else _FAILED) + text.encode())
            raise
        # The ports are free again before any rank goes on: what runs next may want them.
        desk.stop_listening()
        unreached = desk.tell(_PAYLOAD + payload)
        if unreached:
            raise RendezvousError(
                f"{address.url}: {name_ranks(unreached)} came, and went before the payload was sent"
            )


def fetch(place: Place, address: Address, call: int, secret: bytes | None, deadline: float) -> bytes:
    """Another rank: find rank 0, prove itself, wait for the payload."""
    began = time.monotonic()
    seen: dict[str, str] = {}  # what each port last answered
    patience, pause = _PATIENCE, _PAUSE
    missing: list[int] = []
    while True:
        stalled = False
        for where in _doors(address, secret, deadline):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            visit, arrived = _Visit(place, call, deadline, missing), time.monotonic()
            try:
                with contextlib.closing(_connect(where, min(patience, left))) as link:
                    answer = visit.speak(
                        link, derive_key(secret, address.job, where[1][1]), min(patience, left)
                    )
            except RendezvousError:  # rank 0's own word
                raise
            except _NO_PEER as error:
                seen[_show(where[1])] = visit.story(error)
                stalled |= time.monotonic() - arrived >= patience
                continue
            if answer is not None:
                return answer
            seen[_show(where[1])] = "rank 0 is still in an earlier call"
        left = deadline - time.monotonic()
        if left <= 0:
            break
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_PAUSE)
        if stalled:
            patience = min(patience * 2, _LONGEST_PATIENCE)
    waited = f"within {deadline - began:.3g} s"
    tried = "; ".join(f"{where}: {what}" for where, what in seen.items()) or "not tried"
    if missing:
        raise RendezvousTimeoutError(
            f"{address.url}: {name_ranks(missing)} of {place.size} did not come {waited}, says rank 0",
            missing,
        )
    raise RendezvousTimeoutError(
        f"{address.url}: rank 0 did not answer rank {place.rank} at {address} {waited} ({tried}); "
        "is rank 0 running, with the same address, job and PYNCCL_SECRET?",
        [0],
    )


class _Link:
    """One connection: framed bytes, and a way to cut it that also wakes a thread that is reading from it."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self.frames = Connection(sock.detach())

    def cut(self) -> None:
        with contextlib.suppress(OSError):  # the peer has cut it already
            borrowed = socket.socket(fileno=self.frames.fileno())
            try:
                borrowed.shutdown(socket.SHUT_RDWR)
            finally:
                borrowed.detach()

    def close(self) -> None:
        self.frames.close()

    @contextlib.contextmanager
    def cut_after(self, seconds: float) -> Iterator[None]:
        """A read can be kept waiting byte by byte; this bounds all reads of the block together."""
        timer = threading.Timer(max(0.0, seconds), self.cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()


class _Visit:
    """One attempt of a rank to be served; keeps what it reached for the time-out's message."""

    def __init__(self, place: Place, call: int, deadline: float, missing: list[int]):
        self._place, self._call, self._deadline, self._missing = place, call, deadline, missing
        self._reached = "connected"

    def speak(self, link: _Link, key: bytes, patience: float) -> bytes | None:
        """The payload; None if rank 0 is not that far yet. Raises one of _NO_PEER if it is not our rank 0."""
        with link.cut_after(patience):
            answer_challenge(link.frames, key)
            deliver_challenge(link.frames, key)
        self._reached = "welcomed"
        link.frames.send_bytes(_HELLO.pack(_MAGIC, self._place.rank, self._place.size, self._call))
        with link.cut_after(self._deadline + VERDICT_SECONDS - time.monotonic()):
            while True:
                message = link.frames.recv_bytes(MOST_BYTES + 1)
                kind, body = message[:1], message[1:]
                if kind == _PAYLOAD:
                    return body
                if kind == _NOT_YET:
                    return None
                if kind == _MISSING:
                    self._missing[:] = json.loads(body)
                elif kind == _TIMED_OUT:
                    raise RendezvousTimeoutError(body.decode(), self._missing)
                else:
                    raise RendezvousError(body.decode())

    def story(self, error: BaseException) -> str:
        if self._reached == "welcomed":
            return f"rank 0 was there and went away ({_say(error)})"
        if isinstance(error, AuthenticationError):
            return "somebody who does not know this job's secret, or another job"
        if isinstance(error, ConnectionRefusedError):
            return "nobody listens"
        return f"nobody we know ({_say(error)})"


class _Desk:
    """Rank 0's side: listens, lets each newcomer prove itself on a thread, keeps those who did."""

    def __init__(
        self, place: Place, address: Address, call: int, deadline: float, cleanup: contextlib.ExitStack
    ):
        self._place, self._address, self._call, self._deadline = place, address, call, deadline
        self._began = time.monotonic()
        self._cleanup = cleanup
        self._selector = cleanup.enter_context(selectors.DefaultSelector())
        self._listeners: list[socket.socket] = []
        self._strangers: dict[threading.Thread, tuple[_Link, float]] = {}
        self._proven: queue.SimpleQueue[tuple[threading.Thread, str, bytes | str]] = queue.SimpleQueue()
        self._present: dict[int, _Link] = {}
        self._ever: set[int] = set()  # they, and those that left again
        self._refused: dict[str, None] = {}  # an ordered set
        self._told: list[int] | None = None
        self._news_at = 0.0

    def open(self, secret: bytes | None) -> None:
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._cleanup.callback(self._close)
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._take_proven)
        port, self._listeners = _listen(self._address, self._place, secret, self._deadline)
        self._key = derive_key(secret, self._address.job, port)
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def wait_for_all(self) -> None:
        while missing := [rank for rank in range(1, self._place.size) if rank not in self._present]:
            now = time.monotonic()
            if now >= self._deadline:
                raise RendezvousTimeoutError(self._who_is_missing(missing), missing)
            self._send_news(missing, now)
            self._cut_silent_strangers(now)
            for key, _ in self._selector.select(self._next_event(missing) - now):
                callback: Callable[[socket.socket], None] = key.data
                callback(key.fileobj)  # type: ignore[arg-type]  # only sockets are registered

    def tell(self, message: bytes) -> list[int]:
        """Send to all present; the ranks that it did not reach."""
        unreached = []
        for rank, link in self._present.items():
            try:
                link.frames.send_bytes(message)
            except OSError:
                unreached.append(rank)
        return unreached

    def stop_listening(self) -> None:
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners = []

    def _close(self) -> None:
        self.stop_listening()
        for link, _ in self._strangers.values():
            link.cut()
        for thread in list(self._strangers):
            thread.join()
        for link in [*self._present.values(), *(link for link, _ in self._strangers.values())]:
            link.close()
        self._wake_reader.close()
        self._wake_writer.close()

    # Newcomers

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, where = listener.accept()
        except OSError as error:  # gone again before we looked, or no descriptor is left for it
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._strangers:
                    raise RendezvousError(
                        f"{self._address.url}: rank 0 has no file descriptor left for {self._place.size} "
                        "ranks; raise the limit (ulimit -n)"
                    ) from error
                self._cut_oldest_stranger()
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(_SEND_SECONDS), 0))
        link = _Link(sock)
        if len(self._strangers) >= _STRANGERS:
            self._cut_oldest_stranger()
        thread = threading.Thread(
            target=self._prove, args=(link, str(where[0])), name="pynccl-rendezvous", daemon=True
        )
        self._strangers[thread] = (link, time.monotonic() + _HANDSHAKE_SECONDS)
        thread.start()

    def _prove(self, link: _Link, host: str) -> None:
        """On a thread of its own: ends when the peer has said hello, or when the link is cut."""
        try:
            deliver_challenge(link.frames, self._key)
            answer_challenge(link.frames, self._key)
            outcome: bytes | str = link.frames.recv_bytes(_HELLO.size)
        except _NO_PEER as error:
            unknown = isinstance(error, AuthenticationError)
            outcome = "does not know this job's secret" if unknown else f"no handshake: {_say(error)}"
        self._proven.put((threading.current_thread(), host, outcome))
        with contextlib.suppress(BlockingIOError):  # full of wake-ups already
            self._wake_writer.send(b"!")

    def _take_proven(self, reader: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            reader.recv(4096)
        while True:
            try:
                thread, host, outcome = self._proven.get_nowait()
            except queue.Empty:
                return
            thread.join()
            link, _ = self._strangers.pop(thread)
            if isinstance(outcome, str):
                self._note(host, outcome)
                link.close()
            else:
                self._greet(link, host, outcome)

    def _greet(self, link: _Link, host: str, hello: bytes) -> None:
        magic, rank, size, call = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (b"", 0, 0, 0)
        wrong = ""
        if magic != _MAGIC:
            wrong = "another version of pynccl"
        elif size != self._place.size:
            wrong = f"rank {rank} says that the job has {size} ranks, rank 0 says {self._place.size}"
        elif not 0 < rank < size:
            wrong = f"rank {rank}: expected 1 to {size - 1}"
        elif call < self._call:
            wrong = f"rank {rank} comes late, in call {call} of init; rank 0 is in call {self._call} already"
        elif rank in self._present:
            wrong = (
                f"rank {rank} is here already; two processes have this rank, or two jobs share this address"
            )
        if not wrong and call == self._call:
            self._present[rank] = link
            self._ever.add(rank)
            self._selector.register(link.frames, selectors.EVENT_READ, lambda _: self._lose(rank))
            self._told = None  # the newcomer has not heard who is missing
            return
        with contextlib.suppress(OSError):
            link.frames.send_bytes(_FAILED + f"{self._address.url}: {wrong}".encode() if wrong else _NOT_YET)
        link.close()
        if wrong:
            self._note(host, wrong)

    def _lose(self, rank: int) -> None:
        """A rank that is there has nothing more to say: if its link can be read, it has ended."""
        link = self._present.pop(rank)
        self._selector.unregister(link.frames)
        link.close()

    # Time

    def _next_event(self, missing: list[int]) -> float:
        times = [self._deadline, *(until for _, until in self._strangers.values())]
        if self._present and self._told != missing:
            times.append(self._news_at)
        return min(times)

    def _send_news(self, missing: list[int], now: float) -> None:
        if self._present and self._told != missing and now >= self._news_at:
            self.tell(_MISSING + json.dumps(missing).encode())
            self._told, self._news_at = missing, now + _NEWS_SECONDS

    def _cut_silent_strangers(self, now: float) -> None:
        for thread, (link, until) in self._strangers.items():
            if now >= until:
                link.cut()  # its thread then ends and reports
                self._strangers[thread] = (link, self._deadline)

    def _cut_oldest_stranger(self) -> None:
        thread = next(iter(self._strangers))
        link, _ = self._strangers[thread]
        link.cut()
        thread.join()
        self._take_proven(self._wake_reader)

    def _note(self, who: str, why: str) -> None:
        if len(self._refused) < 8:
            self._refused[f"{who}: {why}"] = None

    def _who_is_missing(self, missing: list[int]) -> str:
        text = (
            f"{self._address.url}: {who_is_missing(missing, self._ever, self._place.size)} "
            f"within {self._deadline - self._began:.3g} s"
        )
        return f"{text}; refused: {'; '.join(self._refused)}" if self._refused else text


def _listen(
    address: Address, place: Place, secret: bytes | None, deadline: float
) -> tuple[int, list[socket.socket]]:
    """Listen on every address of the host, on the first port that is free on all of them."""
    hosts = _resolve_in_time(address, deadline)
    literal = address.host == "localhost" or _is_literal(address.host)
    if not literal and place.local_size < place.size and all(_is_loopback(host) for _, host in hosts):
        # Debian calls a machine's own name 127.0.1.1 in its /etc/hosts; other machines come by the real
        # address.
        hosts = _ANYWHERE
    _allow(hosts, address, secret)
    taken: list[str] = []
    for port in address.ports:
        try:
            listeners = _bind_all(hosts, port) or _bind_all(_ANYWHERE, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise RendezvousError(
                    f"{address.url}: rank 0 cannot listen on port {port}: {_say(error)}"
                ) from error
            taken.append(f"{port}: {_say(error)}")
            continue
        if listeners:
            return port, listeners
        raise RendezvousError(f"{address.url}: rank 0 has no network address to listen on")
    raise RendezvousError(
        f"{address.url}: rank 0 cannot listen at {address} ({'; '.join(taken)}); "
        "another program or job is there: choose another port (MASTER_PORT or PYNCCL_PORT, or in the url)"
    )


_ANYWHERE = [(socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]


def _bind_all(hosts: list[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    """Listeners on those of `hosts` that are this machine's; OSError, and none left open, if one is taken."""
    listeners: list[socket.socket] = []
    try:
        for family, host in hosts:
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
                listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((host, port))
                listener.listen(_BACKLOG)
                listener.setblocking(False)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                # The name of a service in front of this machine, or a protocol that it does not have.
                if error.errno == errno.EADDRNOTAVAIL:
                    listeners.pop().close()
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _doors(
    address: Address, secret: bytes | None, deadline: float
) -> Iterator[tuple[socket.AddressFamily, tuple[str, int]]]:
    """Where rank 0 may be, first choice first."""
    hosts = _resolve_in_time(address, deadline)
    _allow(hosts, address, secret)
    for port in address.ports:
        for family, host in hosts:
            yield family, (host, port)


def _resolve_in_time(address: Address, deadline: float) -> list[tuple[socket.AddressFamily, str]]:
    deadline = min(deadline, time.monotonic() + _NAME_SECONDS)
    pause = _PAUSE
    while True:
        try:
            return address.resolve()
        except (socket.gaierror, UnicodeError) as error:
            left = deadline - time.monotonic()
            if left <= 0 or isinstance(error, UnicodeError):
                raise RendezvousError(
                    f"{address.url}: no address for host {address.host!r}: {error}"
                ) from error
            time.sleep(min(pause, left))
            pause = min(pause * 2, _LONGEST_PAUSE)


def _allow(hosts: list[tuple[socket.AddressFamily, str]], address: Address, secret: bytes | None) -> None:
    """SecretError where others on the network could join a job that has no secret."""
    open_to = [host for _, host in hosts if not _is_loopback(host)]
    if open_to and secret is None and not insecure_is_allowed():
        raise SecretError(
            f"{address.url}: {open_to[0]} can be reached from other machines and the job has no secret; "
            "give every rank the same PYNCCL_SECRET or PYNCCL_SECRET_FILE, or, on a network that you trust, "
            "set PYNCCL_INSECURE=1"
        )


def _connect(where: tuple[socket.AddressFamily, tuple[str, int]], seconds: float) -> _Link:
    family, (host, port) = where
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(seconds)
        sock.connect((host, port))
        if sock.getsockname() == sock.getpeername():
            # TCP joins a socket to itself when the port it was given is the one it asks for.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
        return _Link(sock)
    except BaseException:
        sock.close()
        raise


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _show(where: tuple[str, int]) -> str:
    host, port = where
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _say(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
