"""One thread for numpy: its products are small here, and threads would wait for each other and for the program's."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
