"""What every test may rely on: Ctrl-C reaches the processes that tests start.

A shell starts its background jobs deaf to it, and they hand that on.
"""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
