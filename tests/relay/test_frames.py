from urllib.parse import unquote

import pytest
from hpack import Decoder

from proxy.relay import frames
from proxy.relay.events import RelayError


@pytest.mark.parametrize("value", [0, 1, 30, 31, 32, 126, 127, 128, 254, 255, 4096, 100_000])
@pytest.mark.parametrize("mask", [0x0F, 0x1F, 0x7F])
def test_encoded_integers_are_decoded_by_hpack(value, mask):
    from hpack.hpack import decode_integer

    data = frames.integer(0x80 if mask == 0x7F else 0, mask, value)
    assert decode_integer(data, mask.bit_length()) == (value, len(data))


@pytest.mark.parametrize("length", [0, 126, 127, 4095, 4096, 9000])
def test_a_refusal_is_read_by_hpack_and_leaves_its_table_alone(length):
    decoder = Decoder()
    data = frames.refusal(7, 13, "m" * length, answered=False, resize=None)
    word, flags, stream = frames.HEAD.unpack_from(data)
    assert (word & 255, flags, stream, word >> 8) == (frames.HEADERS, 5, 7, len(data) - 9)
    fields = dict(decoder.decode(data[9:]))
    assert fields == {
        ":status": "200",
        "content-type": "application/grpc",
        "grpc-status": "13",
        "grpc-message": "m" * min(length, 4096),
    }
    assert not decoder.header_table.dynamic_entries


@pytest.mark.parametrize(
    ("key", "value", "is_valid"),
    [
        (frames.INITIAL_WINDOW_SIZE, frames.LARGEST_WINDOW, True),
        (frames.INITIAL_WINDOW_SIZE, frames.LARGEST_WINDOW + 1, False),
        (6, (1 << 32) - 1, True),  # SETTINGS_MAX_HEADER_LIST_SIZE has no upper bound
        (frames.MAX_FRAME_SIZE, frames.DEFAULT_FRAME - 1, False),
        (frames.MAX_FRAME_SIZE, frames.LARGEST_FRAME, True),
        (frames.MAX_FRAME_SIZE, frames.LARGEST_FRAME + 1, False),
    ],
)
def test_a_setting_is_refused_only_out_of_its_own_bounds(key: int, value: int, *, is_valid: bool) -> None:
    data = frames.SETTING.pack(key, value)
    if is_valid:
        assert frames.settings(0, 0, data, 0, 6) == [(key, value)]
    else:
        with pytest.raises(RelayError, match="out of bounds"):
            frames.settings(0, 0, data, 0, 6)


def test_a_long_message_is_cut_between_two_characters() -> None:
    data = frames.refusal(1, 2, "核" * 1000, answered=True, resize=None)
    coded = dict(Decoder().decode(data[9:]))["grpc-message"]
    assert unquote(coded, errors="strict") == "核" * (4096 // 9)


@pytest.mark.parametrize(
    ("size", "announced"), [(30, b"\x3e"), (31, b"\x3f\0"), (32, b"\x3f\x01"), (4096, b"\x3f\xe1\x1f")]
)
def test_a_refusal_announces_the_size_of_the_table(size, announced):
    data = frames.refusal(1, 2, "no", answered=True, resize=size)
    assert data[9:].startswith(announced)
    decoder = Decoder()
    decoder.max_allowed_table_size = 4096
    assert dict(decoder.decode(data[9:])) == {"grpc-status": "2", "grpc-message": "no"}
    assert decoder.header_table_size == size


@pytest.mark.parametrize(
    ("text", "coded"),
    [("a b~", "a b~"), ("50%", "50%25"), ("a\nb\x7f", "a%0Ab%7F"), ("ü", "%C3%BC"), ("\ud800", "?")],
)
def test_messages_are_percent_encoded(text, coded):
    data = frames.refusal(1, 2, text, answered=True, resize=None)
    assert dict(Decoder().decode(data[9:])) == {"grpc-status": "2", "grpc-message": coded}


def test_small_frames_are_encoded_byte_by_byte():
    assert frames.window_update(5, 9) == b"\0\0\x04\x08\0\0\0\0\x05\0\0\0\x09"
    assert frames.rst_stream(5, 8) == b"\0\0\x04\x03\0\0\0\0\x05\0\0\0\x08"
    assert frames.goaway(3) == b"\0\0\x08\x07\0\0\0\0\0\0\0\0\x03\0\0\0\0"


def test_padding_is_removed_and_refused_if_too_long():
    assert frames.unpad(0, b"\x01ab", 0, 3) == (0, 3)
    assert frames.unpad(8, b"\x01ab", 0, 3) == (1, 2)
    assert frames.unpad(8, b"\x02ab", 0, 3) == (1, 1)
    for data in (b"", b"\x03ab"):
        with pytest.raises(RelayError):
            frames.unpad(8, data, 0, len(data))
