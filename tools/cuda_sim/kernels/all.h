// Every emulated kernel. Precompiled, as each kernel that is compiled on demand includes it.
#pragma once

#include "indexing.h"
#include "layers.h"
#include "optimizers.h"
#include "plans.h"
#include "random.h"
#include "softmax.h"
#include "sorting.h"
#include "sparse.h"
