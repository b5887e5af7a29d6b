#include "runtime/pipeline/call.hpp"

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/base/caught_error.hpp"
#include "comm/group/rethrow_from.hpp"
#include "runtime/files/json_text.hpp"

namespace sluice {
namespace {

using Json = nlohmann::json;

// Empty for no error.
std::string pack(const std::optional<Error>& error) {
  if (!error) return {};
  return dump_json(Json::array({static_cast<int>(error->code()), error->what()}), -1,
                   InvalidUtf8::replace);
}

}  // namespace

std::optional<Error> error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    return caught_error();
  }
  return std::nullopt;
}

void on_all_ranks(Collectives& world, const std::function<void()>& body) {
  const std::vector<std::string> all = world.all_gather_strings(pack(error_of(body)));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty()) continue;
    const Json error = parse_json(all[rank]);
    throw Refused{Error(static_cast<ErrorCode>(error[0].get<int>()), error[1].get<std::string>(),
                        static_cast<int>(rank))};
  }
}

void require_same_or_refuse(Collectives& world, const Facts& values) {
  try {
    require_same_configuration(world, values);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kMismatch) throw;
    throw Refused{error};
  }
}

}  // namespace sluice
