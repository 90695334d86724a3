// How long products with a model's own weights take: by it, how far ahead weights are fetched is chosen.
#pragma once
#include "forward/model.h"

namespace edgedec {

// As ec_model_time_products. Throws Invalid where the model has no such weights in memory, std::bad_alloc.
double product_seconds(ec_model &model, int32_t type, int32_t n_rows, uint64_t first_byte, uint64_t n_bytes);

}  // namespace edgedec
