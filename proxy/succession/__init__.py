"""Replacing a running daemon by a new process of the installed version, without a failed call.

The running daemon is the *predecessor*, the new process its *successor*:

1. The predecessor starts the successor with its own command line, and sends it the listening socket and the
   lock of the socket over a socket pair. The successor imports everything, reads the configuration and the
   machine, and reports that it is ready. If it fails before this point, it ends, and the predecessor
   continues.
2. The predecessor waits for a moment without a call that places a container, stops accepting (connections
   wait in the socket's queue), and asks its clients to begin no more calls (GOAWAY). Calls that place
   containers normally end in the predecessor. Then it closes the ledger and sends ``go``, with those placing
   calls that have not ended: the runtime may still carry them out (``proxy.executor.former_calls``).
3. The successor opens the ledger, accepts, and reports that it serves.
4. Other calls in flight in the predecessor (a pull of an image, a stop with a long grace period) end there:
   it is only a relay now, and its process ends with the last call. It reports the end of each call that it
   has named in ``go``.

Under systemd the successor becomes the main process of the service (``MAINPID``, sd_notify(3)). If the
predecessor dies before it sends ``go``, the successor gets no answer and ends too, and systemd restarts the
service.
"""
