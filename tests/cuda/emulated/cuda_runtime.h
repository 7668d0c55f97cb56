// Where the sources of cuda/ look for it.
#pragma once

#include "emulated_runtime.h"
