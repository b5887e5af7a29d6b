// The shapes of an SVG picture, and the colours of actions.
#pragma once

#include <string>
#include <string_view>

#include <sluice/schedule.hpp>

namespace sluice {

// One decimal, as coordinates need no more.
[[nodiscard]] std::string svg_number(double value);
// Six digits, as short as the value allows.
[[nodiscard]] std::string svg_plain(double value);
// Printable ASCII that is safe as text.
[[nodiscard]] std::string svg_escaped(std::string_view text);

// Chunk 0 has the full colour, the last chunk is lightened most; digits turn dark on light boxes.
struct Shade {
  std::string fill;
  bool light = false;
};
// Of F, B, I or W; distinct also without colour vision's red and green.
[[nodiscard]] Shade shade_of(ActionKind kind, int chunk, int chunks);

class SvgCanvas {
 public:
  static constexpr double kFontSize = 11, kDigitWidth = 6.7;

  // `words` and `title`, which shows while the pointer is over the shape, are escaped already.
  void text(double x, double y, std::string_view words, std::string_view extra = "class=\"d\"");
  void rectangle(double x, double y, double width, double height, std::string_view fill,
                 std::string_view title = {});
  // `data`: of a path.
  void path(std::string_view data, std::string_view attributes);
  [[nodiscard]] std::string finish(double width, double height) const;

 private:
  std::string body_;
};

}  // namespace sluice
