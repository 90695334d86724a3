/* The part of edgedec_cpu.h for prompts that are kept on the disk, in blocks of whole pages of the KV cache. */
#pragma once
#include "edgedec_cpu.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ec_session_save writes behind keys and values, by itself: what else the session needs of the first n_tokens. */
EC_API uint64_t ec_session_state_bytes(const ec_session *session, int32_t n_tokens);
EC_API int32_t ec_session_save_state(ec_session *session, int32_t n_tokens, const int32_t *places, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_state(ec_session *session, int32_t n_tokens, const void *source, uint64_t n_bytes);
/* Copy the keys and values of the slots [begin, end) in whole pages of 64, as they lie in memory, which does not depend
 * on how many slots there are. */
EC_API uint64_t ec_session_page_bytes(const ec_session *session);
EC_API int32_t ec_session_save_pages(const ec_session *session, int32_t begin, int32_t end, void *target,
                                     uint64_t n_bytes);
EC_API int32_t ec_session_load_pages(ec_session *session, int32_t begin, int32_t end, const void *source,
                                     uint64_t n_bytes);
/* Return a number that another one of so many bytes has by chance once in 2^64: against damage, not against forgers. */
EC_API uint64_t ec_sum(const void *data, uint64_t n_bytes);

#ifdef __cplusplus
}
#endif
