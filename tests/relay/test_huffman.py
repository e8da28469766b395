import pytest
from hpack.huffman import HuffmanEncoder
from hpack.huffman_constants import REQUEST_CODES, REQUEST_CODES_LENGTH
from hypothesis import given
from hypothesis import strategies as st

from proxy.relay import huffman
from proxy.relay.events import RelayError

ENCODER = HuffmanEncoder(REQUEST_CODES, REQUEST_CODES_LENGTH)


@given(st.binary(max_size=60))
def test_length_and_text_of_any_string(text):
    raw = ENCODER.encode(text)
    assert huffman.length(raw) == len(text)
    assert huffman.decode(raw) == text


@given(st.binary(max_size=12))
def test_length_and_decode_agree_on_any_bytes(raw):
    try:
        text = huffman.decode(raw)
    except RelayError:
        with pytest.raises(RelayError):
            huffman.length(raw)
    else:
        assert huffman.length(raw) == len(text)


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (b"\xff\xff\xff\xff", "no valid code"),  # the end-of-string symbol must not be coded
        (ENCODER.encode(b"a") + b"\xff", "inside a symbol"),  # padding of a whole byte
        (bytes([0b00011000]), "inside a symbol"),  # "a" and padding of zeros
    ],
)
def test_an_invalid_string_is_refused_with_the_cause(raw, cause):
    for function in (huffman.length, huffman.decode):
        with pytest.raises(RelayError, match=cause):
            function(raw)
