// The C interface of fetching weights ahead of products.
#include "api_calls.h"
#include "forward/product_times.h"
#include "weights/tensor_types.h"

using namespace edgedec;

int32_t ec_model_set_ahead(ec_model *model, int32_t type, int32_t n_rows, int32_t l1_bytes, int32_t l2_bytes,
                           int32_t l2_times) {
  return guarded([&] {
    require(block_layout(type).columns != 0 && n_rows >= 1 && n_rows <= AHEAD_ROWS, "no such products");
    require(l1_bytes >= USUAL_AHEAD && l1_bytes <= MOST_AHEAD && l2_bytes >= 0 && l2_times >= 0 &&
                (int64_t)l2_bytes * l2_times <= MOST_AHEAD,
            "weights are not fetched so far ahead");
    model->ahead_of(type)[n_rows - 1] = {l1_bytes, l2_bytes, l2_times};
    return EC_OK;
  });
}

int32_t ec_model_time_products(ec_model *model, int32_t type, int32_t n_rows, uint64_t first_byte, uint64_t n_bytes,
                               double *seconds) {
  return guarded([&] {
    require(model->finished && n_rows >= 1 && n_rows <= AHEAD_ROWS && n_bytes >= 1, "there are no products to time");
    if (model->mapping != nullptr) model->mapping->check();
    *seconds = product_seconds(*model, type, n_rows, first_byte, n_bytes);
    if (model->mapping != nullptr) model->mapping->check();
    return EC_OK;
  });
}
