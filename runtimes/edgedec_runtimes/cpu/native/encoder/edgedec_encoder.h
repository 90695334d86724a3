/* The C interface of picture encoders: vision transformers of the SigLIP kind, and what projects their rows to a text
 * model's width. Weights are read where they are, in rows as a GGUF has them: F32, F16, BF16 or Q8_0. The rules of
 * edgedec_cpu.h hold. The rows of a picture have the same bits for any number of threads. */
#ifndef EDGEDEC_ENCODER_H
#define EDGEDEC_ENCODER_H

#include "edgedec_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* instruction_set: as in ec_model_create. */
EC_API int32_t ec_encoder_create(const ec_encoder_config *config, int32_t n_threads, const char *instruction_set,
                                 ec_encoder **encoder);
/* Weights are not copied. transposed: the file has [n_cols][n_rows] (floats only). */
EC_API int32_t ec_encoder_set_matrix(ec_encoder *encoder, int32_t which, int32_t layer, int32_t type, int64_t n_rows,
                                     int64_t n_cols, int32_t transposed, const void *data, uint64_t n_bytes);
EC_API int32_t ec_encoder_set_vector(ec_encoder *encoder, int32_t which, int32_t layer, const float *values, int64_t n);
/* Watch the file that the weights are mapped from; NULL: none. It is closed after the encoder. */
EC_API void ec_encoder_set_mapping(ec_encoder *encoder, const ec_mapping *mapping);
EC_API int32_t ec_encoder_finish(ec_encoder *encoder);
/* Return the bytes that ec_encoder_encode holds meanwhile for n_x * n_y patches; 0 where it takes no such picture. */
EC_API uint64_t ec_encoder_buffer_bytes(const ec_encoder *encoder, int32_t n_x, int32_t n_y);
/* Write n_x * n_y / merge^2 rows of n_out numbers. patches: [n_y * n_x][n_patch]; positions: [n_y * n_x][n_embd].
 * EC_CANCELLED: *cancel became other than 0 (NULL: it never does). EC_NOT_FINITE: a number of a row is infinite or NaN. */
EC_API int32_t ec_encoder_encode(ec_encoder *encoder, const float *patches, const float *positions, int32_t n_x,
                                 int32_t n_y, float *rows, uint64_t n_numbers, const volatile int32_t *cancel);
EC_API void ec_encoder_destroy(ec_encoder *encoder);

#ifdef __cplusplus
}
#endif
#endif
