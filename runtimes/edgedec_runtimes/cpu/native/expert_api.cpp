// The part of the C interface that is about experts.
#include "api_calls.h"

using namespace edgedec;

int32_t ec_model_stream_experts(ec_model *model, int32_t n_slots) {
  return guarded([&] {
    model->streamer.start_experts(n_slots);
    return EC_OK;
  });
}

void ec_model_expert_reads(const ec_model *model, uint64_t *counts) {
  const ExpertStore::Counts found = model->experts.counts();
  counts[0] = found.wanted;
  counts[1] = found.present;
}

void ec_model_experts(const ec_model *model, uint64_t *n_layers, uint64_t *n_experts) {
  for (int32_t n = 0; n <= model->max_rows; ++n) {
    const bool known = (size_t)n < model->touched.size();
    n_layers[n] = known ? model->touched[(size_t)n].n_layers : 0;
    n_experts[n] = known ? model->touched[(size_t)n].n_experts : 0;
  }
}
