"""The output does not depend on how the input bytes are cut."""

import random

import pytest

from proxy.relay.session import Session
from tests.relay.strict_peer import CREATE, VERSION, WINDOW, Net, Owner, Peer, frame, frames

METHODS = [CREATE, "/runtime.v1.RuntimeService/StopContainer", VERSION, "/x.Y/Z"]


def decide(session, stream, message):
    """Return the same decision for the same message in every replay."""
    kind = sum(message) % 4
    if kind == 0:
        session.refuse(stream, 9, "no budget")
    else:
        session.release(stream, None if kind == 1 else message + bytes(kind * 100))


def answer_all(net, rng):
    for sid, stream in list(net.server.streams.items()):
        if stream.remote_closed and not stream.local_closed and stream.reset_received is None:
            net.server.answer(sid, rng.randbytes(rng.randrange(200)), status=rng.choice([0, 0, 5]))


def recorded(seed):
    """Record a conversation of all kinds of frames: padding, priorities, CONTINUATION, table sizes, pings."""
    rng = random.Random(seed)
    net = Net(
        decide,
        client=Peer(client=True, rng=rng, fancy=True, initial=100_000),
        server=Peer(client=False, rng=rng, fancy=True, consume=rng.choice([0, 20_000])),
        paths=METHODS[:2],
    )
    for _ in range(30):
        long = [("x-long", "v" * rng.randrange(40_000))] if rng.random() < 0.1 else []
        unique = [(f"x-{rng.randrange(40)}", f"{rng.randrange(10**9)}") for _ in range(rng.randrange(6))]
        net.client.call(
            rng.choice(METHODS), rng.randbytes(rng.choice([0, 10, 3000, 90_000])), [*unique, *long]
        )
        if rng.random() < 0.2:
            net.client.announce((1, rng.choice([0, 100, 4096, 8192])))
        if rng.random() < 0.2:
            net.server.announce(
                (1, rng.choice([0, 100, 4096, 8192])), (3, 1000), (4, rng.choice([30_000, 90_000]))
            )
        if rng.random() < 0.3:
            net.client.out += frame(2, 0, net.client.next - 2, bytes(5)) + frame(6, 0, 0, bytes(8))
        net.step()
        answer_all(net, rng)
    net.run()
    answer_all(net, rng)
    net.run()
    assert net.owner.requests
    assert len(net.owner.ends) == len(net.owner.requests)
    return net


def replay(turns, cut):
    owner = Owner(decide)
    session = owner.session = Session(owner, frozenset(METHODS[:2]).__contains__)
    up, down = [], []
    for client, data in turns:
        for piece in cut(data):
            (session.from_client if client else session.from_server)(piece)
            up += session.to_server()
            down += session.to_client()
    return b"".join(up), b"".join(down), owner


def without_grants(data):
    """Return frames to the client; grants of the session are added up: a larger read causes one frame."""
    rest, sums = [], {}
    for kind, flags, stream, payload in frames(data):
        if kind == WINDOW:
            sums[stream] = sums.get(stream, 0) + int.from_bytes(payload, "big")
        else:
            rest.append((kind, flags, stream, payload))
    return rest, sums


def pieces(rng, sizes):
    def cut(data):
        while data:
            count = rng.choice(sizes)
            yield data[:count]
            data = data[count:]

    return cut


@pytest.mark.parametrize("seed", range(5))
def test_any_split_gives_the_same_output(seed):
    turns = recorded(seed).turns
    up, down, owner = replay(turns, lambda data: [data])
    assert owner.ends
    rng = random.Random(seed)
    for sizes in ([1], [1, 2, 9, 30], [8, 9, 10, 13], [100, 5000], [3, 16_384, 70_000]) * 2:
        if sizes == [1] and seed:
            continue
        other_up, other_down, other = replay(turns, pieces(rng, sizes))
        assert other_up == up
        rest, sums = without_grants(other_down)
        expected, expected_sums = without_grants(down)
        assert rest == expected
        assert abs(sums.get(0, 0) - expected_sums.get(0, 0)) <= 32_768  # some updates may come later
        assert (other.requests, other.responses, other.ends) == (owner.requests, owner.responses, owner.ends)
