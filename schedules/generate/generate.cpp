#include <array>
#include <cstdint>
#include <limits>

#include <sluice/schedule.hpp>

#include "schedules/generate/generators.hpp"
#include "schedules/model/text.hpp"

namespace sluice {
namespace {

// Where a schedule puts its stages, and which numbers of chunks that allows.
enum class PlacementKind {
  kLinear,  // one chunk
  kLooped,  // any number of chunks
  kVShape,  // two chunks; 1 means two as well
};

struct GeneratorRow {
  std::string_view name;
  PlacementKind placement;
  int chunks;  // of a shape that says none
  Schedule (*generate)(const ScheduleShape& shape);
};

// In the order users see them. The steps of a new one: schedules/README.md.
constexpr std::array kGenerators = {
    GeneratorRow{"gpipe", PlacementKind::kLinear, 1, generators::gpipe},
    GeneratorRow{"gpipe-lifo", PlacementKind::kLinear, 1, generators::gpipe_lifo},
    GeneratorRow{"1f1b", PlacementKind::kLinear, 1, generators::one_f_one_b},
    GeneratorRow{"1f1b-eager", PlacementKind::kLinear, 1, generators::one_f_one_b_eager},
    GeneratorRow{"interleaved", PlacementKind::kLooped, 2, generators::interleaved},
    GeneratorRow{"looped-bfs", PlacementKind::kLooped, 2, generators::looped_bfs},
    GeneratorRow{"zb-h1", PlacementKind::kLinear, 1, generators::zb_h1},
    GeneratorRow{"zb-h2", PlacementKind::kLinear, 1, generators::zb_h2},
    GeneratorRow{"interleaved-zb", PlacementKind::kLooped, 2, generators::interleaved_zb},
    GeneratorRow{"zb-v", PlacementKind::kVShape, 2, generators::zb_v},
    GeneratorRow{"v-half", PlacementKind::kVShape, 2, generators::v_half},
    GeneratorRow{"v-min", PlacementKind::kVShape, 2, generators::v_min},
    GeneratorRow{"dualpipe-v", PlacementKind::kVShape, 2, generators::dualpipe_v},
    GeneratorRow{"forward-only", PlacementKind::kLooped, 1, generators::forward_only},
};

const GeneratorRow& row_of(std::string_view name) {
  for (const GeneratorRow& row : kGenerators) {
    if (row.name == name) return row;
  }
  std::string known;
  for (const std::string& each : schedule_names()) known += (known.empty() ? "" : ", ") + each;
  refuse("unknown schedule '", name, "'; known are ", known);
}

void require_positive(std::string_view what, int value) {
  if (value < 1) {
    refuse("schedule shape: ", what, " is ", value, "; the nearest legal value is 1");
  }
}

// The shape with the chunks that the schedule has; refuses what the placement does not allow.
ScheduleShape legal_shape(const GeneratorRow& row, ScheduleShape shape) {
  if (shape.chunks == 0) shape.chunks = row.chunks;
  require_positive("ranks", shape.ranks);
  require_positive("micro-batches", shape.micro_batches);
  require_positive("chunks", shape.chunks);
  if (row.placement == PlacementKind::kLinear && shape.chunks != 1) {
    refuse("schedule '", row.name, "' runs one chunk per rank; chunks is ", shape.chunks,
           ", the nearest legal value is 1");
  }
  if (row.placement == PlacementKind::kVShape) {
    if (shape.chunks > 2) {
      refuse("schedule '", row.name, "' runs two chunks per rank, there and back; chunks is ",
             shape.chunks, ", the nearest legal value is 2");
    }
    shape.chunks = 2;
  }
  const std::int64_t most = std::numeric_limits<std::int32_t>::max();
  const std::int64_t stages = std::int64_t{shape.ranks} * shape.chunks;
  if (stages > most || stages * shape.micro_batches > most) {
    refuse("schedule shape: ", stages, " stages with ", shape.micro_batches,
           " micro-batches each; at most ", most, " pairs of stage and micro-batch are legal",
           stages > most ? "" : concat(", here ", most / stages, " micro-batches or fewer"));
  }
  return shape;
}

}  // namespace

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const GeneratorRow& row : kGenerators) list.emplace_back(row.name);
    return list;
  }();
  return names;
}

int stages_of(std::string_view name, const ScheduleShape& given) {
  const ScheduleShape shape = legal_shape(row_of(name), given);
  return shape.ranks * shape.chunks;
}

Placement placement_of(std::string_view name, const ScheduleShape& given) {
  const GeneratorRow& row = row_of(name);
  const ScheduleShape shape = legal_shape(row, given);
  return row.placement == PlacementKind::kVShape ? Placement::v_shape(shape.ranks)
                                                 : Placement::looped(shape.ranks, shape.chunks);
}

Schedule generate(std::string_view name, const ScheduleShape& given) {
  const GeneratorRow& row = row_of(name);
  return row.generate(legal_shape(row, given));
}

Schedule generate_forward_only(const Placement& placement, int micro_batches) {
  return generators::forward_only(placement, micro_batches);
}

}  // namespace sluice
