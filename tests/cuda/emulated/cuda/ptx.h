// Where the sources of cuda/ look for it.
#pragma once

#include "emulated_ptx.h"
